"""The effects of the stagger, flat activations and short messages, and their measurement."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.cyclic.meter import Report, peak_together
from laconic.cyclic.program import messages_per_step
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, Schedule
from tests.support.launch import run_ranks

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


def job_live(rule: str, times: tuple[float, float], steps: int) -> Report:
    mesh = init_device_mesh("cpu", (COUNT,))
    run = CyclicDataParallel(
        [Slow(*times) for _ in range(COUNT)], loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, rule=rule
    )
    for step in range(steps):
        if step == 2:  # the pipeline is filled, and durations are measured
            run.report.clear_trace()
        run.step((torch.randn(2, 8), torch.randn(2, 8)))
    report = run.report
    run.drain()
    return report


def peaks(reports: list[Report]) -> list[int]:
    """The largest number of stage activations alive on all workers, in each of worker 0's batches."""
    begins = [moment for moment, alive in reports[0].trace if alive == 1][
        ::2
    ]  # the number rises to 1 and falls to 1 in every batch
    return [
        peak_together([[event for event in r.trace if event[0] < end] for r in reports], since=begin)
        for begin, end in pairwise(begins)
    ]


def test_live_activations_stay_flat() -> None:
    for times in ((0.06, 0.06), (0.04, 0.08)):
        reports = run_ranks(job_live, COUNT, "v2", times, 5)
        assert min(peaks(reports)) <= COUNT * (COUNT + 1) // 2 + COUNT // 2
        assert all(r.live_peak == COUNT and r.live_now == 0 for r in reports)  # a single worker saves no memory
        assert all(len(r.durations_s) == len(r.waits_s) == 2 * COUNT for r in reports)
    reports = run_ranks(job_live, COUNT, "dp", (0.06, 0.06), 4)
    assert max(peaks(reports)) == COUNT**2


def job_durations() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (COUNT,))
    run = CyclicDataParallel(
        [Slow(0.0, 0.05) for _ in range(COUNT)], loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, rule="v2"
    )
    baton = run._worker.baton
    before = baton._pass_after
    for _ in range(2):
        run.step((torch.randn(2, 8), torch.randn(2, 8)))
    run.drain()
    return before, baton._pass_after


def test_the_baton_is_passed_after_a_share_of_the_measured_time() -> None:
    """An N-th of a batch's time is two of 2 N equal ops; here it is N short ones, and one of N long ones."""
    assert run_ranks(job_durations, COUNT) == [(2, COUNT + 1)] * COUNT


def job_bytes(states: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (COUNT,))
    stages = [nn.Linear(16, 16, bias=False) for _ in range(COUNT)]
    run = CyclicDataParallel(stages, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, states=states)  # type: ignore[arg-type]
    by_step = []
    for _ in range(4):
        before = run.traffic.snapshot()
        run.step((torch.randn(2, 16), torch.randn(2, 16)))
        by_step.append(run.traffic.snapshot() - before)
    held = {stage: run._placement.buffers[stage].untyped_storage().nbytes() for stage in range(COUNT)}
    owned = run.rule.switch.index(dist.get_rank() or 0)
    passing = 16 * 16 * 4 if states == "replicated" else 0
    assert held == {stage: 16 * 16 * 4 if stage == owned else passing for stage in range(COUNT)}
    steady, burst = by_step[-1], run.report.largest_burst
    by_op = run.report.bytes_per_step
    run.drain()
    return {
        "sent": {purpose: steady.total("local", purpose, "sent") for purpose in ("weights", "gradients", "control")},  # type: ignore[arg-type]
        "batons": steady.total("local", "control", "received"),
        "burst": burst,
        "by_op": by_op,
        "is_first": dist.get_rank() == 0,
    }


def test_bytes_are_those_of_the_schedule() -> None:
    """Counted bytes are the schedule's messages times a stage's bytes."""
    stage_bytes = 16 * 16 * 4
    for states in ("replicated", "sharded"):
        results = run_ranks(job_bytes, COUNT, states)
        schedule = Schedule(Rule.named("v2", COUNT), states)  # type: ignore[arg-type]
        for worker, result in enumerate(results):
            own = [m for step in messages_per_step(schedule, 9) for m in step if m.source == worker and m.sent_in == 3]
            weights = sum(m.kind in ("weights", "rear weights") for m in own) * stage_bytes
            assert result["sent"]["weights"] == weights
            assert result["sent"]["gradients"] == (len(own) * stage_bytes - weights)
            assert sum(result["by_op"]) == weights + result["sent"]["gradients"]
            assert result["sent"]["control"] == (8 if worker < COUNT - 1 else 0)
            assert result["batons"] == (8 if worker > 0 else 0)
            assert max(result["by_op"]) <= (1 if states == "replicated" else 2) * stage_bytes
        if states == "replicated":  # a ring all-reduce also sends 2 (N - 1) / N of the model
            assert {r["burst"] for r in results} == {stage_bytes}
            total = sum(r["sent"]["weights"] + r["sent"]["gradients"] for r in results)
            assert total == (2 * COUNT * (COUNT - 1) + COUNT - 1) * stage_bytes


def job_bursts() -> dict[str, list[int]]:
    """The bytes that this worker sends between two ops of three batches, by rule."""
    mesh, found = init_device_mesh("cpu", (COUNT,)), {}
    for rule in ("v1", "v2", "lag2", "clip"):
        stages = [nn.Linear(16, 16, bias=False) for _ in range(COUNT)]
        run = CyclicDataParallel(stages, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh, rule=rule)
        sent = [0]
        for _ in range(3):
            run.step((torch.randn(2, 16), torch.randn(2, 16)))
            first, *rest = run.report.bytes_per_step
            sent[-1] += first
            sent += rest
        assert run.report.largest_burst == max(sent)
        found[rule] = sent
        run.close()
    return found


def test_a_worker_sends_one_stage_between_two_ops() -> None:
    """Every worker, under every rule: as the schedule says, time step by time step."""
    for worker, found in enumerate(run_ranks(job_bursts, COUNT)):
        for rule, sent in found.items():
            schedule = Schedule(Rule.named(rule, COUNT))
            planned = [sum(m.source == worker for m in step) for step in messages_per_step(schedule, 9)]
            begin = schedule.forward_step(worker, 0, 0)
            assert sent[:-1] == [count * 16 * 16 * 4 for count in planned[begin : begin + len(sent) - 1]], rule
            assert max(sent) == 16 * 16 * 4


def job_levels() -> dict[str, int]:
    mesh = init_device_mesh("cpu", (COUNT,))
    stages = [nn.Linear(16, 16, bias=False) for _ in range(COUNT)]
    run = CyclicDataParallel(stages, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), mesh)
    for _ in range(3):
        run.step((torch.randn(2, 16), torch.randn(2, 16)))
    run.drain()
    traffic = run.traffic.snapshot()
    return {level: traffic.total(level, "gradients", "sent") for level in ("local", "node")}  # type: ignore[arg-type]


def test_only_messages_between_nodes_count_as_such() -> None:
    """On two nodes of two ranks worker 1 sends gradients to the other node, workers 0 and 2 to the same node."""
    first, second, third, last = run_ranks(job_levels, COUNT, local=2)
    sum_bytes = 3 * COUNT * 16 * 16 * 4  # of three batches
    assert first == third == {"local": sum_bytes, "node": 0}
    assert second == {"local": 0, "node": sum_bytes}
    owners = Rule.named("v2", COUNT).owner
    totals = [owners(stage) // 2 for stage in range(COUNT) if owners(stage) != COUNT - 1]
    stage_bytes = sum_bytes // COUNT
    assert last == {"local": totals.count(1) * stage_bytes, "node": totals.count(0) * stage_bytes}
