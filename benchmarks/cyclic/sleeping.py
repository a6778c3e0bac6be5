"""The job of the ranks for the rows about the schedule: the runtime on stages of known length, observed from outside.

[Note: Stages that sleep]
A test of the schedule needs operations that take as long as they should, but 4 or 8 workers cannot compute side by side
on 2 cores. So these stages compute almost nothing and sleep, once in forward and once in backward. The stages record
when a forward begins and when a backward ends, so the count of live activations does not come from the runtime.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from laconic.comm.traffic import Traffic
from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.schedule.schedule import StatePlacement

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
