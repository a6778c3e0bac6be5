"""A parameter on two stages, and the norm over all stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic.pipeline import PipelinePolicy
from tests.pipeline.toys import assert_same_gradients, descend, full
from tests.reference.pipeline import whole_loss
from tests.support import pipelines as toys
from tests.support.launch import on_ranks


def assert_tied_and_clipped(schedule: Any, num_ranks: int, inner: int, *, ends_alone: bool = True) -> None:
    model, oracle = toys.blocks(tied=True), toys.blocks(tied=True)
    pipeline = toys.start(PipelinePolicy(schedule=schedule), num_ranks, inner, model=model, ends_alone=ends_alone)
    for step in range(2):
        tokens, target = toys.batch(step, 8)
        whole_loss(oracle, tokens, target, toys.loss_of, micro_batches=4)
        pipeline.step(tokens, target)
        for norm_type in (3.0, float("inf"), 2.0):
            wanted = nn.utils.clip_grad_norm_(oracle.parameters(), 0.9, norm_type)
            torch.testing.assert_close(pipeline.clip_grad_norm_(0.9, norm_type), wanted, rtol=1e-5, atol=1e-7)
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)
    named = {name: full(each) for module in pipeline.modules.values() for name, each in module.named_parameters()}
    ends = [named[name] for name in ("0.weight", "8.weight") if name in named]
    assert all(torch.equal(ends[0], each) for each in ends)


@pytest.mark.parametrize(("schedule", "inner"), [("GPipe", 0), ("GPipe", 1), ("ZBVZeroBubble", 0)])
@on_ranks(2, local=2)
def test_tied_and_clipped(schedule: Any, inner: int) -> None:
    """The embedding and the head are one parameter: on two ranks, or on two stages of one."""
    assert_tied_and_clipped(schedule, 2, inner)


@pytest.mark.parametrize(
    ("schedule", "ends_alone"),
    [
        ("1F1B", True),
        ("1F1B", False),
        pytest.param("ZBVZeroBubble", False, marks=pytest.mark.heavy),
        pytest.param("LoopedBFS", True, marks=pytest.mark.heavy),
    ],
)
@on_ranks(6, local=3)
def test_tied_and_clipped_where_copies_are_cut(schedule: Any, ends_alone: bool) -> None:
    """Over three ranks: alike, or each with other parameters of its stage."""
    assert_tied_and_clipped(schedule, 2, 3, ends_alone=ends_alone)
