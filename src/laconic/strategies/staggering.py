"""What the cyclic schedule did in a step, put together over workers."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from laconic.comm.agreement import RankGroup
from laconic.cyclic.report import Report, peak_together

Event = tuple[float, int]
"""(time.monotonic(), stage activations alive on a device from then on)."""


@dataclass(frozen=True, kw_only=True)
class Staggering:
    """One step of one device."""

    events: tuple[Event, ...]
    """When its activations came and went."""
    bytes_per_step: tuple[int, ...]
    """Sent in each of its time steps."""
    on_time: float
    """The share of its time steps for which it did not wait."""

    @staticmethod
    def of(report: Report) -> Staggering:
        """Of the last step."""
        count = len(report.durations_s)  # each time step brings an activation, or takes one away
        return Staggering(
            events=tuple(report.trace[index] for index in range(-count, 0)),
            bytes_per_step=tuple(report.bytes_per_step),
            on_time=report.on_time,
        )


@dataclass(frozen=True, kw_only=True)
class Cyclic:
    """One step of all devices."""

    live_now: int
    """Stage activations alive on all devices together when rank 0 had done the step. Devices of different machines,
    whose clocks cannot be compared, count with their peak: it is then an upper bound, and so is live_peak."""
    live_peak: int
    """The most at one moment of rank 0's step."""
    bytes_per_time_step: float
    """Sent by a device in one time step, the mean over all."""
    largest_burst_bytes: int
    """The most that a device sent in one time step."""
    stagger_kept: float
    """The share of time steps for which devices did not have to wait."""


def gather(steps: Sequence[Staggering], group: dist.ProcessGroup) -> list[Cyclic]:
    """Combine the same steps of all ranks. Collective: some hundred bytes per rank and step."""
    machines, by_rank = zip(*RankGroup(group).gather((_machine(), tuple(steps))), strict=True)
    return [together(by_rank, index, machines) for index in range(len(steps))]


def together(by_rank: Sequence[Sequence[Staggering]], index: int, machines: Sequence[str]) -> Cyclic:
    """Combine one step of several; `machines` says whose clocks are one."""
    step = [own[index] for own in by_rank]
    # While rank 0 takes a step, others may still be in the one before.
    traces = [[event for part in own[max(index - 1, 0) : index + 2] for event in part.events] for own in by_rank]
    near = [trace for trace, machine in zip(traces, machines, strict=True) if machine == machines[0]]
    far = [trace for trace, machine in zip(traces, machines, strict=True) if machine != machines[0]]
    start, end = step[0].events[0][0], step[0].events[-1][0]
    elsewhere = sum(max(alive for _, alive in trace) for trace in far)
    sent = [size for own in step for size in own.bytes_per_step]
    time_steps = sum(len(own.events) for own in step)
    return Cyclic(
        live_now=sum(_alive_at(trace, end) for trace in near) + elsewhere,
        live_peak=peak_together([[e for e in trace if e[0] <= end] for trace in near], since=start) + elsewhere,
        bytes_per_time_step=sum(sent) / time_steps,
        largest_burst_bytes=max(sent),
        stagger_kept=sum(own.on_time for own in step) / len(step),
    )


def _machine() -> str:
    """The same for all processes with one time.monotonic(), those of an emulated network's nodes among them."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()


def _alive_at(trace: Sequence[Event], moment: float) -> int:
    return next((alive for time, alive in reversed(trace) if time <= moment), 0)
