"""Adafactor, torch's and transformers', on sharded parameters equals itself on whole ones, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.ragged.tensor import RaggedTensor
from tests.ragged.test_reductions import SHAPES, Some
from tests.support.launch import on_ranks

pytestmark = pytest.mark.heavy

STEPS = 3


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, weight_decay=0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, foreach=True, maximize=True),
    "transformers": lambda parameters: transformers.Adafactor(parameters, beta1=0.9, weight_decay=0.1),
}


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(SHAPES[name], generator=generator)
        is_sharded = isinstance(parameter, RaggedTensor)
        parameter.grad = torch.empty_like(parameter).copy_(gradient).detach() if is_sharded else gradient


def compare(sharded: Any, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        got = sharded.get_parameter(name).full_tensor()
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(3)
def test_adafactor_equals_the_unsharded_one_and_resumes_to_the_bit(tmp_path: Path) -> None:
    for case, make in OPTIMIZERS.items():
        plain, sharded, resumed = (
            Some(),
            *(laconic.fully_shard(Some(), mesh=laconic.init_mesh("cpu")) for _ in range(2)),
        )
        optimizers = [make(model.requires_grad_().parameters()) for model in (plain, sharded, resumed)]
        for step in range(2 * STEPS):
            if step == STEPS:
                save_checkpoint(f"{tmp_path}/{case}", step, model=sharded, optimizer=optimizers[1], extra={})
                load_checkpoint(f"{tmp_path}/{case}", model=resumed, optimizer=optimizers[2])
            for model, optimizer in list(zip((plain, sharded, resumed), optimizers, strict=True))[
                : 2 + (step >= STEPS)
            ]:
                set_gradients(model, step)
                optimizer.step()
        compare(sharded, plain)
        for name, parameter in sharded.named_parameters():
            assert torch.equal(resumed.get_parameter(name).full_tensor(), parameter.full_tensor()), name
