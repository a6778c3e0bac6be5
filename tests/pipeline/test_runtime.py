"""A pipeline against one process that sees the whole batch: tests/reference/pipeline.py."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.pipeline import SCHEDULES, PipelinePolicy, cut_pipeline
from tests.pipeline.toys import assert_same_gradients, assert_trains_as_one_process, descend
from tests.reference.pipeline import whole_loss
from tests.support import pipelines as toys
from tests.support.launch import on_ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2, local=1)
def test_stages_train_as_one_process(schedule: Any) -> None:
    pipeline = toys.start(PipelinePolicy(schedule=schedule, micro_batches=4), 2, 1)
    assert_trains_as_one_process(pipeline, toys.blocks(), rows=8, steps=3)


AWKWARD = [
    ("GPipe", 1, None), ("1F1B", 5, None), ("Interleaved1F1B", 2, 3), ("LoopedBFS", 1, 2),
    ("InterleavedZeroBubble", 5, 2), ("ZBVZeroBubble", 2, None), ("DualPipeV", 7, None),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "micro_batches", "chunks"), AWKWARD, ids=[each[0] for each in AWKWARD])
@on_ranks(3, local=1)
def test_odd_ranks_and_few_micro_batches(schedule: Any, micro_batches: int, chunks: int | None) -> None:
    """Stages of one to three blocks on three ranks; rows of one."""
    policy = PipelinePolicy(schedule=schedule, micro_batches=micro_batches, stages_per_rank=chunks, wire="8bit")
    pipeline = toys.start(policy, 3, 0, model=toys.blocks(9))
    assert_trains_as_one_process(pipeline, toys.blocks(9), rows=micro_batches)


def assert_gradients_add_up(schedule: Any, num_steps: int, num_batches: int, **sharding: Any) -> None:
    """Each rank of a stage has rows of its own. All are reduced once, with those of the last batch."""
    model, oracle = toys.blocks(tied=True), toys.blocks(tied=True)
    pipeline = toys.start(PipelinePolicy(schedule=schedule), 2, 2, model=model, **sharding)
    own = torch.distributed.get_rank() % 2
    for step in range(num_steps):
        for number in range(num_batches):
            for replica in range(2):
                tokens, target = toys.batch(20 * step + 2 * number + replica, 4, tokens=3 + number)  # other shapes
                loss = whole_loss(oracle, tokens, target, lambda *it: toys.loss_of(*it) / 2, micro_batches=4)
                if replica == own:
                    before = pipeline.traffic.snapshot()
                    told = pipeline.step(tokens, target, is_last=number == num_batches - 1)
                    moved = pipeline.traffic.snapshot() - before
                    torch.testing.assert_close(told, 2 * loss, rtol=1e-5, atol=1e-6)
                    assert number == num_batches - 1 or moved.total("node", "gradients") == 0
            pipeline.evaluate(tokens, target)  # in between
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@on_ranks(4, local=2)
def test_gradients_add_up_over_batches(schedule: Any) -> None:
    assert_gradients_add_up(schedule, num_steps=1, num_batches=2)


@on_ranks(4, local=2)
def test_weights_rest_between_the_micro_batches_of_a_step() -> None:
    """Unless they stay on the rank: torch's own stages keep them whole from the first backward to the end of a step.

    Its runtime of schedules gathers all of them at first besides.
    """
    peaks = {}
    for schedule, cache in (("1F1B", "none"), ("Eager1F1B", "none"), ("1F1B", "rank")):
        policy = PipelinePolicy(schedule=schedule, micro_batches=4)  # type: ignore[arg-type]
        cut = cut_pipeline([nn.Linear(32, 32) for _ in range(24)], 2)
        pipeline = toys.start(policy, 2, 2, cut=cut, cache=cache)
        pipeline._loss_fn = nn.functional.mse_loss
        (stage,) = pipeline.modules.values()
        for _ in range(2):
            stage.reset_peak_memory()  # type: ignore[operator]
            pipeline.step(torch.ones(8, 32), torch.ones(8, 32))
        peaks[schedule, cache] = stage.memory().device_peak_bytes  # type: ignore[operator]
    assert peaks["1F1B", "none"] < peaks["1F1B", "rank"] - sum(p.nbytes for p in stage.parameters()) / 3
    assert peaks["Eager1F1B", "none"] == peaks["1F1B", "none"]


@pytest.mark.parametrize("schedule", ["GPipe", "ZBVZeroBubble"])
@on_ranks(2, local=1)
def test_outputs_leave_with_their_loss(schedule: Any) -> None:
    """Of several micro-batches under way no output is alive when the next one comes."""
    pipeline = toys.start(PipelinePolicy(schedule=schedule, micro_batches=3), 2, 1)
    outputs: list[weakref.ref[Tensor]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert not any(each() is not None for each in outputs)
        outputs.append(weakref.ref(output))
        return output.sum()

    pipeline._loss_fn = loss_fn
    pipeline.step(*toys.batch(0, 6))
    assert len(outputs) == (3 if pipeline.has_last else 0)


@pytest.mark.heavy
@pytest.mark.parametrize("cache", ["none", "host", "device", "rank", "auto"])
@pytest.mark.parametrize(
    "schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@on_ranks(4, local=1)
def test_gradients_add_up_under_every_cache(schedule: Any, cache: str) -> None:
    """The ranks of a stage are two nodes, so that caches have something to keep."""
    assert_gradients_add_up(schedule, num_steps=2, num_batches=2, cache=cache)


ROUNDING = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("schedule", ["GPipe", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@on_ranks(2, local=1)
def test_micro_batches_of_bfloat16_add_up_in_float32(schedule: Any) -> None:
    """Split backwards, too; the weights leave after each forward. torch's own stage is 1.4e-2 off."""
    policy = PipelinePolicy(schedule=schedule, micro_batches=16)
    pipeline = toys.start(policy, 2, 1, mp_policy=ROUNDING, reshard_after_forward=True)
    oracle = toys.blocks()
    shown = toys.blocks().to(torch.bfloat16)
    tokens, target = toys.batch(0, 16)
    for part, goal in zip(tokens.chunk(16), target.chunk(16), strict=True):
        whole_loss(shown, part, goal, lambda *it: toys.loss_of(*it) / 16, micro_batches=1)
        for parameter, low in zip(oracle.parameters(), shown.parameters(), strict=True):
            assert low.grad is not None
            parameter.grad = low.grad.float() + (0 if parameter.grad is None else parameter.grad)
            low.grad = None
    pipeline.step(tokens, target)
    assert_same_gradients(pipeline, oracle, most=2e-4)


@pytest.mark.machine
@on_ranks(3, local=1)
def test_processes_train_as_one_process() -> None:
    """Over Gloo's own messages, of which 1F1B sends and receives some together."""
    for schedule, wire in (("1F1B", "8bit"), ("Interleaved1F1B", "exact"), ("ZBVZeroBubble", "8bit")):
        policy = PipelinePolicy(schedule=schedule, micro_batches=6, wire=wire)  # type: ignore[arg-type]
        pipeline = toys.start(policy, 3, 1, model=toys.blocks(9, tied=True))
        assert_trains_as_one_process(pipeline, toys.blocks(9, tied=True), rows=6)
