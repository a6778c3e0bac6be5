"""What a pipeline is compared with: one process that sees the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laconic.pipeline import Pipeline
from tests.reference.pipeline import whole_loss
from tests.support.pipelines import TOKENS, batch, loss_of

LR = 0.3


def full(value: Any) -> Tensor:
    """A tensor, or all of one that is cut."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_gradients(pipeline: Pipeline, oracle: nn.Module, most: float = 2e-5) -> None:
    """Gradients differ by no more than a part of the largest one."""
    wanted = {name: each.grad for name, each in oracle.named_parameters(remove_duplicate=False)}
    for module in pipeline.modules.values():
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == (wanted[name] is None), name
            goal = wanted[name]
            if goal is not None:
                difference = (full(parameter.grad) - goal).abs().max()
                assert difference <= most * goal.abs().max(), (name, float(difference))


@torch.no_grad()
def descend(pipeline: Pipeline, oracle: nn.Module) -> None:
    """Take a step of both, and clear the gradients."""
    for parameter in (*pipeline.parameters(), *oracle.parameters()):
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=LR)
            parameter.grad = None


def crossing_blocks(pipeline: Pipeline) -> set[int]:
    """The first blocks of the stages whose inputs come from another rank."""
    owners = [pipeline.policy.rank_of(stage, pipeline.num_ranks) for stage in range(pipeline.num_stages)]
    return {pipeline.cut.borders[stage] for stage in range(1, len(owners)) if owners[stage - 1] != owners[stage]}


def assert_trains_as_one_process(pipeline: Pipeline, oracle: nn.ModuleList, rows: int, steps: int = 2) -> None:
    """Losses and gradients are those of the oracle, at some steps."""
    policy = pipeline.policy
    coded = crossing_blocks(pipeline) if policy.wire == "8bit" else ()
    for step in range(steps):
        tokens, target = batch(step, rows, tokens=TOKENS + step // 2)  # other shapes from the third on
        evaluated = pipeline.evaluate(tokens, target)
        loss = whole_loss(oracle, tokens, target, loss_of, micro_batches=policy.micro_batches, coded=coded)
        torch.testing.assert_close(evaluated, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pipeline.step(tokens, target), loss, rtol=1e-5, atol=1e-6)
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)
