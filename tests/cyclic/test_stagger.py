"""The effects of the stagger, flat activations and short messages, and their measurement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.cyclic.meter import Report
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, StageCache, StatePlacement
from tests.cyclic.toys import sent
from tests.support.launch import on_ranks, run_ranks

COUNT = 4


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return grad, None, None


class Slow(nn.Module):
    """A stage whose forward and backward take a given time."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(8, 8), (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Takes.apply(self.linear(x), *self.times)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


Trace = list[tuple[float, int]]
"""The moments at which the number of live stage activations of a worker changes, and the number from then on."""


def job_live(rule: str, times: tuple[float, float], steps: int) -> tuple[Report, Trace]:
    mesh = init_device_mesh("cpu", (COUNT,))
    run = CyclicDataParallel(
        [Slow(*times) for _ in range(COUNT)], loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, rule=rule
    )
    report, trace = run.report, []
    add_live = report.add_live

    def traced(change: int) -> None:
        add_live(change)
        trace.append((time.monotonic(), report.live_now))

    report.add_live = traced  # type: ignore[method-assign]
    for step in range(steps):
        if step == 2:  # the pipeline is filled, and durations are measured
            trace.clear()
        run.step((torch.randn(2, 8), torch.randn(2, 8)))
    run.drain()
    del report.add_live
    return report, trace


def peaks(traces: Sequence[Trace]) -> list[int]:
    """The largest number of stage activations alive on all workers, in each of worker 0's batches."""
    # The number rises to 1 and falls to 1 in every batch.
    begins = [moment for moment, alive in traces[0] if alive == 1][::2]
    alive, found = [0] * COUNT, [0] * len(begins)
    events = [(moment, worker, count) for worker, trace in enumerate(traces) for moment, count in trace]
    for moment, worker, count in sorted(events):
        alive[worker] = count
        batch = sum(begin <= moment for begin in begins) - 1
        if batch >= 0:
            found[batch] = max(found[batch], sum(alive))
    return found[:-1]


def test_live_activations_stay_flat() -> None:
    for times in ((0.06, 0.06), (0.04, 0.08)):
        reports, traces = zip(*run_ranks(job_live, COUNT, "v2", times, 5), strict=True)
        assert min(peaks(traces)) <= COUNT * (COUNT + 1) // 2 + COUNT // 2
        assert all(r.live_peak == COUNT and r.live_now == 0 for r in reports)  # a single worker saves no memory
        assert all(len(r.durations_s) == len(r.waits_s) == 2 * COUNT for r in reports)
    _, traces = zip(*run_ranks(job_live, COUNT, "dp", (0.06, 0.06), 4), strict=True)
    assert max(peaks(traces)) == COUNT**2


@on_ranks(COUNT)
def test_the_baton_is_passed_after_a_share_of_the_measured_time() -> None:
    """An N-th of a batch's time is two of 2 N equal ops; here it is N short ones, and one of N long ones."""
    mesh = init_device_mesh("cpu", (COUNT,))
    run = CyclicDataParallel(
        [Slow(0.0, 0.05) for _ in range(COUNT)], loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, rule="v2"
    )
    baton = run._worker.baton
    assert baton._pass_after == 2
    for _ in range(2):
        run.step((torch.randn(2, 8), torch.randn(2, 8)))
    run.drain()
    assert baton._pass_after == COUNT + 1


STAGE_BYTES = 16 * 16 * 4


def make_run(rule: str = "v2", states: StatePlacement = "replicated", cache: StageCache = "none") -> CyclicDataParallel:
    stages = [nn.Linear(16, 16, bias=False) for _ in range(COUNT)]
    mesh = init_device_mesh("cpu", (COUNT,))
    return CyclicDataParallel(
        stages, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, rule=rule, states=states, cache=cache
    )


@pytest.mark.parametrize(
    ("rule", "states", "cache"),
    [
        *((rule, "replicated", "none") for rule in ("v1", "v2", "lag2", "clip")),
        ("v2", "sharded", "none"),
        ("v2", "sharded", "host"),
    ],
)
@on_ranks(COUNT)
def test_bytes_are_those_of_the_schedule_time_step_by_time_step(
    rule: str, states: StatePlacement, cache: StageCache
) -> None:
    """Counted bytes are the schedule's messages times a stage's bytes; a worker sends one stage between two ops."""
    run, worker = make_run(rule, states, cache), dist.get_rank()
    by_op = [0]
    for _ in range(4):
        before = run.traffic.snapshot()
        run.step((torch.randn(2, 16), torch.randn(2, 16)))
        counted = run.traffic.snapshot() - before
        first, *rest = run.report.bytes_per_step
        by_op[-1] += first
        by_op += rest
    held = {stage: run._placement.buffers[stage].untyped_storage().nbytes() for stage in range(COUNT)}
    passing = STAGE_BYTES if states == "replicated" else 0
    assert held == {stage: STAGE_BYTES if run.rule.owner(stage) == worker else passing for stage in range(COUNT)}
    planned = [(step, batch, m) for step, batch, m in sent(run.schedule, 5) if m.source == worker]
    own = [m for _, batch, m in planned if batch == 3]
    kinds = Counter(m.kind for m in own)
    assert kinds["rear weights"] == (kinds["weights"] if states == "sharded" and cache == "none" else 0)
    weights = (kinds["weights"] + kinds["rear weights"]) * STAGE_BYTES
    assert counted.total("local", "weights", "sent") == weights
    assert counted.total("local", "gradients", "sent") == len(own) * STAGE_BYTES - weights
    assert sum(run.report.bytes_per_step) == len(own) * STAGE_BYTES
    assert counted.total("local", "control", "sent") == (8 if worker < COUNT - 1 else 0), "the baton"
    assert counted.total("local", "control", "received") == (8 if worker > 0 else 0)
    assert max(run.report.bytes_per_step) <= 2 * STAGE_BYTES
    if states == "replicated":
        assert max(by_op) == STAGE_BYTES
        counts, begin = Counter(step for step, _, _ in planned), run.schedule.step(worker, 0, 0)
        assert by_op[:-1] == [counts[begin + place] * STAGE_BYTES for place in range(len(by_op) - 1)]
    run.close()


@on_ranks(COUNT, local=2)
def test_only_messages_between_nodes_count_as_such() -> None:
    """On two nodes of two ranks worker 1 sends gradients to the other node, workers 0 and 2 to the same node."""
    run, worker = make_run(), dist.get_rank()
    for _ in range(3):
        run.step((torch.randn(2, 16), torch.randn(2, 16)))
    run.drain()
    found = [run.traffic.snapshot().total(level, "gradients", "sent") for level in ("local", "node")]  # type: ignore[arg-type]
    owner = Rule.named("v2", COUNT).owner
    totals = [owner(stage) // 2 for stage in range(COUNT) if owner(stage) != COUNT - 1]
    stages = {0: [COUNT, 0], 1: [0, COUNT], 2: [COUNT, 0], 3: [totals.count(1), totals.count(0)]}[worker]
    assert found == [3 * count * STAGE_BYTES for count in stages], "of three batches"
