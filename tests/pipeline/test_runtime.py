"""A pipeline against one process that sees the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.pipeline import SCHEDULES, Pipeline, PipelinePolicy
from tests.pipeline import toys
from tests.support.launch import on_ranks

LR = 0.3


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_gradients(pipeline: Pipeline, oracle: nn.ModuleList, most: float = 2e-5) -> None:
    wanted = dict(oracle.named_parameters(remove_duplicate=False))
    for module in pipeline.modules.values():
        for name, parameter in module.named_parameters():
            difference = (full(parameter.grad) - wanted[name].grad).abs().max()
            assert difference <= most * wanted[name].grad.abs().max(), (name, float(difference))  # type: ignore[union-attr]


def descend(pipeline: Pipeline, oracle: nn.ModuleList) -> None:
    with torch.no_grad():
        for parameter in (*pipeline.parameters(), *oracle.parameters()):
            parameter.sub_(parameter.grad, alpha=LR)
            parameter.grad = None


def assert_trains_as_one_process(pipeline: Pipeline, oracle: nn.ModuleList, rows: int, steps: int = 2) -> None:
    for step in range(steps):
        tokens, target = toys.batch(step, rows)
        loss = toys.loss_of(toys.logits_of(oracle, tokens), target)
        loss.backward()
        torch.testing.assert_close(pipeline.evaluate(tokens, target), loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pipeline.step(tokens, target), loss.detach(), rtol=1e-5, atol=1e-6)
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2, local=1)
def test_stages_train_as_one_process(schedule: Any) -> None:
    pipeline = toys.start(PipelinePolicy(schedule=schedule, micro_batches=4), 2, 1)
    assert_trains_as_one_process(pipeline, toys.blocks(), rows=8)
