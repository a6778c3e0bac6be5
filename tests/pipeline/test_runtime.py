"""A pipeline against one process that sees the whole batch: tests/reference/pipeline.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.codec import CODECS
from laconic.pipeline import SCHEDULES, Pipeline, PipelinePolicy, cut_pipeline
from tests.pipeline import toys
from tests.reference.pipeline import whole_loss
from tests.support.launch import on_ranks

LR = 0.3


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_gradients(pipeline: Pipeline, oracle: nn.Module, most: float = 2e-5) -> None:
    wanted = {name: each.grad for name, each in oracle.named_parameters(remove_duplicate=False)}
    for module in pipeline.modules.values():
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == (wanted[name] is None), name
            if parameter.grad is not None:
                difference = (full(parameter.grad) - wanted[name]).abs().max()
                assert difference <= most * wanted[name].abs().max(), (name, float(difference))  # type: ignore[union-attr]


@torch.no_grad()
def descend(pipeline: Pipeline, oracle: nn.Module) -> None:
    for parameter in (*pipeline.parameters(), *oracle.parameters()):
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=LR)
            parameter.grad = None


def crossing_blocks(pipeline: Pipeline) -> set[int]:
    """The first blocks of the stages whose inputs come from another rank."""
    owners = [pipeline.policy.rank_of(stage, pipeline.num_ranks) for stage in range(pipeline.num_stages)]
    return {pipeline.cut.borders[stage] for stage in range(1, len(owners)) if owners[stage - 1] != owners[stage]}


def assert_trains_as_one_process(pipeline: Pipeline, oracle: nn.ModuleList, rows: int, steps: int = 2) -> None:
    policy = pipeline.policy
    coded = crossing_blocks(pipeline) if policy.wire == "8bit" else ()
    for step in range(steps):
        tokens, target = toys.batch(step, rows, tokens=toys.TOKENS + step // 2)  # other shapes from the third on
        evaluated = pipeline.evaluate(tokens, target)
        loss = whole_loss(oracle, tokens, target, toys.loss_of, micro_batches=policy.micro_batches, coded=coded)
        torch.testing.assert_close(evaluated, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pipeline.step(tokens, target), loss, rtol=1e-5, atol=1e-6)
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)


@pytest.mark.parametrize("wire", ["exact", "8bit"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2, local=1)
def test_stages_train_as_one_process(schedule: Any, wire: str) -> None:
    policy = PipelinePolicy(schedule=schedule, micro_batches=4, wire=wire)
    assert_trains_as_one_process(toys.start(policy, 2, 1), toys.blocks(), rows=8, steps=3)


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


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
@on_ranks(4, local=2)
def test_gradients_add_up_over_steps(schedule: Any) -> None:
    """Reduced once, over the ranks of a stage, of which each has rows of its own."""
    pipeline, oracle = (
        toys.start(PipelinePolicy(schedule=schedule), 2, 2, model=toys.blocks(tied=True)),
        toys.blocks(tied=True),
    )
    own = torch.distributed.get_rank() % 2
    for step in range(2):
        for number in range(3):
            before = pipeline.traffic.snapshot()
            for replica in range(2):
                tokens, target = toys.batch(20 * step + 2 * number + replica, 4)
                loss = whole_loss(oracle, tokens, target, lambda *it: toys.loss_of(*it) / 2, micro_batches=4)
                if replica == own:
                    told = pipeline.step(tokens, target, is_last=number == 2)
                    torch.testing.assert_close(told, 2 * loss, rtol=1e-5, atol=1e-6)
            if number < 2:
                moved = pipeline.traffic.snapshot() - before
                assert moved.total(level="node", purpose="gradients") == 0
            torch.testing.assert_close(pipeline.evaluate(tokens, target).isnan(), torch.tensor(False))  # in between
        assert_same_gradients(pipeline, oracle)
        descend(pipeline, oracle)


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


@pytest.mark.parametrize("wire", ["exact", "8bit"])
@pytest.mark.parametrize(("schedule", "boundaries"), [("1F1B", 1), ("LoopedBFS", 3), ("DualPipeV", 2)])
@on_ranks(2, local=1)
def test_bytes_are_those_of_the_tokens(schedule: Any, boundaries: int, wire: str) -> None:
    """2 T h bytes in bfloat16 a boundary and direction, a mask of one byte a token, and nothing inside a rank."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pipeline = toys.start(PipelinePolicy(schedule=schedule, wire=wire), 2, 1, mp_policy=precision)
    tokens, target = toys.batch(0, 8, tokens=16)
    numel = tokens.numel() * toys.D
    each_way = 2 * numel if wire == "exact" else 4 * CODECS["int8"].payload_bytes(numel // 4)
    for trains, call in ((True, pipeline.step), (False, pipeline.evaluate)):
        call(tokens, target)  # the first one looks for shapes
        before = pipeline.traffic.snapshot()
        call(tokens, target)
        moved = pipeline.traffic.snapshot() - before
        assert moved.total(level="local", purpose="activations") == 0
        both = [moved.total("node", "activations", way) for way in ("sent", "received")]  # type: ignore[arg-type]
        assert sum(both) == boundaries * (each_way * (1 + trains) + tokens.numel())


@on_ranks(2, local=2)
def test_inside_a_machine_bytes_are_local() -> None:
    pipeline = toys.start(PipelinePolicy(), 2, 1)
    pipeline.step(*toys.batch(0, 8))
    moved = pipeline.traffic.snapshot()
    assert moved.wire() == 0
    assert moved.total("local", "activations") > 0


@on_ranks(2, local=1)
def test_what_is_frozen_sends_no_gradients() -> None:
    """The first stage has nothing to train: its activations need no gradient, so none comes back."""
    model, oracle = toys.blocks(), toys.blocks()
    for each in (*model[:4], *oracle[:4]):
        each.requires_grad_(False)
    cut = cut_pipeline(model, 2, borders=[4])
    pipeline = toys.start(PipelinePolicy(), 2, 1, cut=cut)
    assert_trains_as_one_process(pipeline, oracle, rows=4)
    moved = pipeline.traffic.snapshot()
    assert moved.total("node", "activations", "sent") * pipeline.has_last == 0


@pytest.mark.parametrize("inner", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS", "ZBVZeroBubble"])
@on_ranks(4, local=2)
def test_tied_and_clipped(schedule: Any, inner: int) -> None:
    """The embedding and the head are one parameter: on two ranks, or on two stages of one."""
    oracle = toys.blocks(tied=True)
    pipeline = toys.start(
        PipelinePolicy(schedule=schedule), 2 if inner == 2 else 4, inner, model=toys.blocks(tied=True)
    )
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
    assert not ends or all(torch.equal(ends[0], each) for each in ends)


@on_ranks(2, local=1)
def test_losses_in_eight_bits_follow_those_of_exact_ones() -> None:
    """40 steps of Adam: losses fall to a third, and the last ones differ by less than 2 %."""
    curves = {
        wire: toys.curve(PipelinePolicy(schedule="1F1B", wire=wire), 2, num_steps=40) for wire in ("exact", "8bit")
    }
    assert curves["exact"][-1] < curves["exact"][0] / 3
    assert curves["8bit"] != curves["exact"]
    assert curves["8bit"][-1] == pytest.approx(curves["exact"][-1], rel=0.02)
