"""What the ranks of benchmarks/cyclic.py run: the runtime with stages of known length, watched from outside.

[Note: Stages that sleep]
Whether a schedule is kept shows only where an operation takes as long as it should, and 4 or 8 workers do not compute
side by side on 2 cores. So these stages compute next to nothing, and sleep: once in forward and once in backward. They
note themselves when a forward begins and when a backward has ended, so that the count of live activations is not the
runtime's own.
"""

from __future__ import annotations

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

from laconic.comm.traffic import Traffic
from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.schedule.schedule import StatePlacement

WIDTH = 64
STAGE_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
"""Of a message of a stage's parameters or gradients; a multiple of 16, so that nothing is padded."""


@dataclass
class Log:
    """What one worker did, in order."""

    alive: list[tuple[float, int]] = field(default_factory=list)
    """(time.monotonic(), +1 or -1) of stage activations."""
    sent_bytes: list[list[int]] = field(default_factory=lambda: [[]])
    """Messages by time step: before the first op, and after each."""
    received_bytes: list[list[int]] = field(default_factory=lambda: [[]])


class _Enter(torch.autograd.Function):
    """The first thing in a stage's forward, and so the last in its backward."""

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
    """Takes a fixed time, both ways."""

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
class Watched:
    """What one worker's run showed."""

    start_s: float
    end_s: float
    """time.monotonic() before the first step and after the drain."""
    log: Log
    on_time: float
    """Share of time steps, by the runtime."""


def run_sleeping(rule: str, states: StatePlacement, num_stages: int, batches: int, op_s: float) -> Watched:
    """Train sleeping stages on this rank's worker."""
    torch.set_num_threads(1)
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
        del by_step[-1]  # after the last op comes the drain, which is in no time step
    dist.barrier()
    return Watched(start_s=start_s, end_s=end_s, log=log, on_time=sum(on_time) / len(on_time))


def live_over_time(workers: Sequence[Watched]) -> list[tuple[float, int]]:
    """(seconds from the start, stage activations alive from then on), over all workers of one machine."""
    start_s = min(worker.start_s for worker in workers)
    # Of two events at one time the end of an activation comes first.
    events = sorted(event for worker in workers for event in worker.log.alive)
    found, alive = [], 0
    for moment, change in events:
        alive += change
        found.append((moment - start_s, alive))
    return found


# ------------------------------------------------------------------------------------------------ equal bits


def train_digest(rule: str, states: StatePlacement, num_stages: int, batches: int) -> list[np.ndarray]:
    """The parameters that this rank's device holds after some batches; without ranks all of them."""
    torch.set_num_threads(1)
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
        mine = trainer.schedule.states in ("replicated", "sharded")
        trainer.step(micro_batches[dist.get_rank()] if mine else micro_batches)
    trainer.drain()
    held = trainer.schedule.stages_of(dist.get_rank() if mesh is not None else 0)
    return [parameter.detach().numpy() for stage in held for parameter in stages[stage].parameters()]
