"""Shampoo against its naive reference; test_owners.py and test_family.py have it on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic.optim.shampoo import Shampoo, preconditioned_blocks
from tests.optim.matrices import random_tensors
from tests.reference import shampoo as reference

SETTINGS: list[dict[str, Any]] = [
    {"update_every": 2},
    {"block_size": 5, "update_every": 3, "start_step": 2, "grafting": "rmsprop", "weight_decay": 0.1},
    {"block_size": 4, "update_every": 1, "grafting": "sgd", "betas": (0.0, 0.9), "eps": 1e-3},
    {"block_size": 64, "update_every": 1, "grafting": "none", "exponent": 0.5, "eps": 1e-2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.get("grafting", "adam"))
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-7), (torch.float32, 1e-2)])
@pytest.mark.parametrize("shape", [(7, 11), (1, 6)])
def test_equals_the_definition(settings: dict[str, Any], dtype: torch.dtype, rtol: float, shape: Any) -> None:
    """In fp64 to seven digits; in fp32 to two, since the smallest eigenvalues are a millionth of the largest."""
    (start,) = random_tensors([shape], seed=1, dtype=dtype)
    parameter = nn.Parameter(start.clone())
    optimizer = Shampoo([parameter], lr=0.1, **settings)
    naive = reference.Shampoo(start, lr=0.1, **settings)
    for step in range(6):
        (grad,) = random_tensors([shape], seed=20 + step, dtype=dtype)
        parameter.grad = grad
        optimizer.step()
        naive.step(grad)
        torch.testing.assert_close(parameter.detach().double(), naive.matrix, rtol=rtol, atol=rtol)


def test_zero_gradients_leave_the_matrix() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    parameter.grad = torch.zeros(4, 3)
    optimizer = Shampoo([parameter], update_every=1)
    for _ in range(2):
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(4, 3))


def test_before_the_first_preconditioned_step_it_is_the_grafted_rule() -> None:
    values = random_tensors([(6, 5), (4,)], seed=3)
    params, twins = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer = Shampoo(params, lr=0.1, weight_decay=0.01, start_step=4, update_every=1)
    adamw = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.01)
    for step in range(4):
        for a, b, grad in zip(params, twins, random_tensors([(6, 5), (4,)], seed=30 + step), strict=True):
            a.grad, b.grad = grad, grad.clone()
        optimizer.step()
        adamw.step()
        matrix_is_equal = torch.allclose(params[0], twins[0], rtol=1e-5, atol=1e-6)
        assert matrix_is_equal == (step < 3)
        torch.testing.assert_close(params[1], twins[1])


def test_blocks_tile_the_tensor() -> None:
    for shape in ((7, 11), (8, 4), (2, 3, 5, 6), (0, 3)):
        seen = torch.zeros(shape)
        for block, rows, columns in preconditioned_blocks(shape, 4):
            assert seen[block].shape == (rows, columns)
            assert max(rows, columns) <= 4
            seen[block] += 1
        assert torch.equal(seen, torch.ones(shape))
