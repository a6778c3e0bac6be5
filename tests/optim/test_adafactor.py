"""Adafactor, torch's and transformers', on sharded parameters equals itself on whole ones, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.ragged.tensor import RaggedTensor
from tests.ragged.test_reductions import SHAPES, Some
from tests.support.launch import on_ranks

STEPS = 2


def of_transformers(parameters: Any) -> torch.optim.Optimizer:
    import transformers

    return transformers.Adafactor(parameters, beta1=0.9, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, weight_decay=0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, foreach=True, maximize=True),
    "transformers": of_transformers,
}


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(SHAPES[name], generator=generator)
        is_sharded = isinstance(parameter, RaggedTensor)
        parameter.grad = torch.empty_like(parameter).copy_(gradient).detach() if is_sharded else gradient


@pytest.mark.parametrize("case", list(OPTIMIZERS))
@on_ranks(3)
def test_adafactor_equals_the_unsharded_one_and_resumes_to_the_bit(case: str, tmp_path: Path) -> None:
    plain = Some().requires_grad_()
    sharded, resumed = (laconic.fully_shard(Some().requires_grad_(), mesh=laconic.init_mesh("cpu")) for _ in range(2))
    models: list[Any] = [plain, sharded]
    optimizers = [OPTIMIZERS[case](model.parameters()) for model in (plain, sharded, resumed)]
    for step in range(2 * STEPS):
        if step == STEPS:
            save_checkpoint(tmp_path, step, model=sharded, optimizer=optimizers[1], extra={})
            load_checkpoint(tmp_path, model=resumed, optimizer=optimizers[2])
            models.append(resumed)
        for model, optimizer in zip(models, optimizers, strict=False):
            set_gradients(model, step)
            optimizer.step()
    for name, parameter in plain.named_parameters():
        got, again = (model.get_parameter(name).full_tensor() for model in (sharded, resumed))
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(again, got), name
