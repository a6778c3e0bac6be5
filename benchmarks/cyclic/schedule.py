"""The job of the ranks for the rows about the schedule: the runtime on stages of known length, observed from outside.

[Note: Stages that sleep]
A test of the schedule needs operations that take as long as they should, but 4 or 8 workers cannot compute side by side
on 2 cores. So these stages compute almost nothing and sleep, once in forward and once in backward. The stages record
when a forward begins and when a backward ends, so the count of live activations does not come from the runtime.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from benchmarks.cyclic.bench import BENCHMARK, TIMEOUT_S, Bench
from laconic.comm.traffic import Traffic
from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.schedule import Rule, Schedule, StatePlacement
from tests.support.launch import launch
from tests.support.record import Row

WIDTH = 64
STAGE_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
"""The size of a message with a stage's parameters or gradients: a multiple of 16, so nothing is padded."""


@dataclass
class Log:
    """The events of one worker, in order."""

    alive: list[tuple[float, int]] = field(default_factory=list)
    """(time.monotonic(), change): +1 when a stage activation begins to live, -1 when it ends."""
    sent_bytes: list[list[int]] = field(default_factory=lambda: [[]])
    """The sizes of the messages that this worker sent before the first op, and after each op."""
    received_bytes: list[list[int]] = field(default_factory=lambda: [[]])
    """The sizes of the messages that this worker received, as in `sent_bytes`."""


class _Enter(torch.autograd.Function):
    """The first operation of a stage's forward, and so the last of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, log: Log) -> Tensor:
        ctx.log = log
        log.alive.append((time.monotonic(), 1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.log.alive.append((time.monotonic(), -1))
        _end_op(ctx.log)
        return gradients[0], None, None


class _Sleep(torch.autograd.Function):
    """Takes a fixed time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, log: Log) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        _end_op(log)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


def _end_op(log: Log) -> None:
    log.sent_bytes.append([])
    log.received_bytes.append([])


class SleepingStage(nn.Module):
    """A small layer that takes `op_s` seconds in forward, and in backward."""

    def __init__(self, op_s: float, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.op_s, self.log = op_s, log

    def forward(self, x: Tensor) -> Tensor:
        x = cast(Tensor, _Enter.apply(x, self.linear.weight, self.log))
        return cast(Tensor, _Sleep.apply(torch.tanh(self.linear(x)), self.op_s, self.log))


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The run of one worker."""

    start_s: float
    """time.monotonic() before the first step."""
    end_s: float
    """time.monotonic() after the drain."""
    log: Log
    on_time: float
    """The fraction of time steps that began on time, as the runtime reports it."""


def run_sleeping(rule: str, states: StatePlacement, num_stages: int, batches: int, op_s: float) -> Observation:
    """Train sleeping stages as the worker of this rank."""
    torch.manual_seed(0)
    log = Log()
    stages = [SleepingStage(op_s, log) for _ in range(num_stages)]
    trainer = CyclicDataParallel(
        stages,
        functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        init_device_mesh("cpu", (dist.get_world_size(),)),
        rule=rule,
        states=states,
    )
    count = Traffic.count

    def counting(self: Traffic, level: Any, purpose: Any, *, sent_bytes: int, received_bytes: int) -> None:
        if purpose != "control":
            log.sent_bytes[-1] += [sent_bytes] * (sent_bytes > 0)
            log.received_bytes[-1] += [received_bytes] * (received_bytes > 0)
        count(self, level, purpose, sent_bytes=sent_bytes, received_bytes=received_bytes)

    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    on_time = []
    with mock.patch.object(Traffic, "count", counting):
        dist.barrier()
        start_s = time.monotonic()
        for _ in range(batches):
            trainer.step(batch)
            on_time.append(trainer.report.on_time)
        trainer.drain()
        end_s = time.monotonic()
    for by_step in (log.sent_bytes, log.received_bytes):
        del by_step[-1]  # after the last op comes the drain, which belongs to no time step
    dist.barrier()
    return Observation(start_s=start_s, end_s=end_s, log=log, on_time=sum(on_time) / len(on_time))


def live_over_time(workers: Sequence[Observation]) -> list[tuple[float, int]]:
    """Return (seconds from the start, number of live stage activations from then on), over all workers of a machine."""
    start_s = min(worker.start_s for worker in workers)
    # Of two events at the same time, the end of an activation (-1) comes first.
    events = sorted(event for worker in workers for event in worker.log.alive)
    found, alive = [], 0
    for moment, change in events:
        alive += change
        found.append((moment - start_s, alive))
    return found


def _run_sleeping(bench: Bench, rule: str, num_workers: int, batches: int) -> list[Observation]:
    args = rule, "replicated", num_workers, batches, bench.op_s
    return launch(run_sleeping, *args, num_ranks=num_workers, timeout_s=TIMEOUT_S)


@BENCHMARK.row("live")
def live(bench: Bench) -> Row:
    measured, notes, is_met = [], [], True
    for n in bench.num_workers:
        cyclic, plain = (
            [alive for _, alive in live_over_time(_run_sleeping(bench, rule, n, bench.batches))]
            for rule in ("v2", "dp")
        )
        ideal = n * (n + 1) // 2
        is_met &= max(cyclic) <= ideal + n // 2 and max(plain) == n * n
        measured.append(f"N={n}: {max(cyclic)} against {max(plain)}")
        notes.append(f"N={n}: ideal {ideal}, at most {ideal + n // 2}")
    return Row(
        claim=(
            "live stage activations summed over workers, "
            f"N = {', '.join(map(str, bench.num_workers))}, at most, against dp"
        ),
        required="N(N+1)/2 + at most N/2, against N^2",
        measured="; ".join(measured),
        is_met=is_met,
        note=(
            f"{'; '.join(notes)}. Rule v2 on Gloo, equal stages of {bench.op_s * 1e3:.0f} ms each way, "
            f"{bench.batches} batches, counted by the stages, from the beginning of a forward to the end of its "
            "backward."
        ),
    )


@BENCHMARK.row("messages")
def messages(bench: Bench) -> Row:
    n, by_rule, most, largest, burst = 4, [], 0, 0.0, 0.0
    for rule in ("v1", "v2", "lag2", "clip"):
        workers = _run_sleeping(bench, rule, n, bench.batches + 2)
        sends, receives = (
            max(len(step) for worker in workers for step in getattr(worker.log, name))
            for name in ("sent_bytes", "received_bytes")
        )
        steps = [step for worker in workers for step in worker.log.sent_bytes if step]
        largest = max(largest, max(size for step in steps for size in step) / (n * STAGE_BYTES))
        burst = max(burst, max(map(sum, steps)) / (n * STAGE_BYTES))
        most = max(most, sends, receives)
        by_rule.append(f"{rule} {sends} + {receives}")
    return Row(
        claim=f"messages per worker per time step, N = {n}, sends + receives / largest burst, against DP's all-reduce",
        required="<= 2 + 2 / P/N against P",
        measured=f"{', '.join(by_rule)} / {burst:.3f} P, in messages of {largest:.3f} P",
        is_met=most <= 2 and burst <= 1 / n,
        note=(
            "counted at the sender and the receiver, between the ops of the runtime on Gloo, replicated states; P: "
            "bytes of all parameters. The burst is what a worker sends between two ops. An all-reduce begins with P "
            f"bytes on every worker, and each worker sends {2 * (n - 1) / n:.2f} P. New parameters of a stage wait for "
            "one time step where a gradient sum leaves, under every rule. Receives are counted where they are taken: "
            "the sum of the first stage after the last backward, its new parameters before the next forward."
        ),
    )


@BENCHMARK.row("wall-clock")
def wall_clock(bench: Bench) -> Row:
    n, ratios, on_time = 4, {}, {}
    ideal_s = Schedule(Rule.named("v2", n)).num_steps(bench.wall_batches) * bench.op_s
    for rule in ("v2", "lag2", "v1"):
        workers = _run_sleeping(bench, rule, n, bench.wall_batches)
        wall_s = max(worker.end_s for worker in workers) - min(worker.start_s for worker in workers)
        ratios[rule] = wall_s / ideal_s
        on_time[rule] = statistics.mean(worker.on_time for worker in workers)
    measured = ", ".join(f"{rule} {ratio:.3f}x" for rule, ratio in ratios.items())
    return Row(
        claim="wall-clock against the ideal 2N-step schedule, unshaped",
        required="<= 1.10x",
        measured=measured,
        is_met=max(ratios.values()) <= 1.10,
        note=(
            f"N = {n} processes, {bench.wall_batches} batches of stages that take {bench.op_s * 1e3:.0f} ms each way, "
            f"filling and draining included: {ideal_s:.2f} s ideally. Time steps on time: "
            f"{', '.join(f'{rule} {fraction:.0%}' for rule, fraction in on_time.items())}."
        ),
    )


@BENCHMARK.row("devices")
def devices(bench: Bench) -> Row:
    n, batches, rule = 4, 5, "v2"
    schedule = Schedule(Rule.named(rule, n), "shared")
    alone = train(rule, "replicated", n, batches)
    shared, replicated = (
        launch(train, rule, states, n, batches, num_ranks=num_ranks, num_local=1, timeout_s=TIMEOUT_S)
        for states, num_ranks in (("shared", schedule.num_devices), ("replicated", n))
    )
    models = {"shared": stages_of_devices(schedule, shared)}
    models |= {f"worker {worker}": parameters for worker, parameters in enumerate(replicated)}
    differing = [
        name
        for name, parameters in models.items()
        if not all(np.array_equal(a, b) for a, b in zip(parameters, alone, strict=True))
    ]
    return Row(
        claim=f"devices for model and data parallelism, N = {n}",
        required=f"{n * (n + 1) // 2} against {n * n}, same result to the bit",
        measured=f"{schedule.num_devices} against {n * n}, {'equal' if not differing else 'different'} bits",
        is_met=schedule.num_devices == n * (n + 1) // 2 and not differing,
        note=(
            f"parameters after {batches} batches of AdamW, rule {rule}, on {schedule.num_devices} ranks with shared "
            f"stages, on {n} ranks with replicated ones, and in one process"
            f"{': ' + ', '.join(differing) if differing else ''}."
        ),
    )


def stages_of_devices(schedule: Schedule, by_device: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Return the parameters of all stages, each from its first device; all devices of a stage must agree."""
    parameters = []
    for stage in range(schedule.num_stages):
        first, *others = (by_device[device] for device in schedule.devices_of(stage))
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        parameters += first
    return parameters


def train(rule: str, states: StatePlacement, num_stages: int, batches: int) -> list[np.ndarray]:
    """Train, and return the parameters that this rank's device holds; in a process without ranks, all parameters."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    trainer = CyclicDataParallel(
        stages,
        functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        mesh,
        rule=rule,
        states=states,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        micro_batches = [
            (torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))
            for _ in range(num_stages)
        ]
        has_one_worker = trainer.schedule.states in ("replicated", "sharded")
        trainer.step(micro_batches[dist.get_rank()] if has_one_worker else micro_batches)
    trainer.drain()
    held = trainer.schedule.stages_of(dist.get_rank() if mesh is not None else 0)
    return [parameter.detach().numpy() for stage in held for parameter in stages[stage].parameters()]
