"""The measurements of one step of the cyclic schedule, on one device and on all devices together."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.comm.agreement import RankGroup
from laconic.cyclic.meter import Report, peak_together

ActivationEvent = tuple[float, int]
"""(time.monotonic(), the number of stage activations alive on a device from then on)."""


@dataclass(frozen=True, kw_only=True)
class DeviceTimeline:
    """The measurements of one step on one device."""

    events: tuple[ActivationEvent, ...]
    """One event per time step, since each creates or frees one stage's activations."""
    bytes_per_step: tuple[int, ...]
    """The bytes that the device sent in each time step."""
    on_time: float
    """The share of time steps before which the device hardly waited: see `Report.on_time`."""

    @staticmethod
    def of(report: Report) -> DeviceTimeline:
        """The measurements of the last step in `report`."""
        num_events = len(report.durations_s)
        return DeviceTimeline(
            events=tuple(report.trace[index] for index in range(-num_events, 0)),
            bytes_per_step=tuple(report.bytes_per_step),
            on_time=report.on_time,
        )

    def to_json(self) -> list[Any]:
        """Return the fields as lists and numbers."""
        return [[list(event) for event in self.events], list(self.bytes_per_step), self.on_time]

    @staticmethod
    def from_json(fields: list[Any]) -> DeviceTimeline:
        """Return the timeline of `to_json`."""
        events, bytes_per_step, on_time = fields
        return DeviceTimeline(
            events=tuple((when, alive) for when, alive in events), bytes_per_step=tuple(bytes_per_step), on_time=on_time
        )


@dataclass(frozen=True, kw_only=True)
class CyclicMetrics:
    """One step on all devices. Clocks of machines differ: with several, live_now and live_peak are upper bounds."""

    live_now: int
    """Stage activations alive on all devices when rank 0 ends its step. Other machines count with their peaks."""
    live_peak: int
    """The largest number of stage activations alive at one moment of rank 0's step."""
    bytes_per_time_step: float
    """The bytes that a device sends in one time step, on average."""
    largest_burst_bytes: int
    """The largest number of bytes that a device sent in one time step."""
    stagger_kept: float
    """The mean of `DeviceTimeline.on_time` over devices."""


def gather_metrics(timelines: Sequence[DeviceTimeline], group: dist.ProcessGroup) -> list[CyclicMetrics]:
    """Combine the same steps of all ranks. Collective; every rank sends some hundred bytes per step."""
    gathered: list[Any] = RankGroup(group).gather([_machine(), [timeline.to_json() for timeline in timelines]])
    machines = [machine for machine, _ in gathered]
    by_rank = [[DeviceTimeline.from_json(fields) for fields in of_rank] for _, of_rank in gathered]
    return [combine(by_rank, index, machines) for index in range(len(timelines))]


def combine(by_rank: Sequence[Sequence[DeviceTimeline]], index: int, machines: Sequence[str]) -> CyclicMetrics:
    """Combine step `index` of all devices; `by_rank` has the same steps of each device, `machines` its machine."""
    step = [timelines[index] for timelines in by_rank]
    # While rank 0 takes a step, other ranks may be in the step before or after.
    near: list[list[ActivationEvent]] = []  # events of the devices that share rank 0's clock
    far_peaks = 0  # the sum of the peaks of all other devices
    for timelines, machine in zip(by_rank, machines, strict=True):
        events = [event for timeline in timelines[max(index - 1, 0) : index + 2] for event in timeline.events]
        if machine == machines[0]:
            near.append(events)
        else:
            far_peaks += max(alive for _, alive in events)
    start, end = step[0].events[0][0], step[0].events[-1][0]
    until_end = [[event for event in events if event[0] <= end] for events in near]
    sent = [nbytes for timeline in step for nbytes in timeline.bytes_per_step]
    return CyclicMetrics(
        live_now=sum(events[-1][1] for events in until_end if events) + far_peaks,
        live_peak=peak_together(until_end, since=start) + far_peaks,
        bytes_per_time_step=sum(sent) / sum(len(timeline.events) for timeline in step),
        largest_burst_bytes=max(sent),
        stagger_kept=sum(timeline.on_time for timeline in step) / len(step),
    )


def _machine() -> str:
    """A name of this machine, the same for all processes that share a clock: also for all nodes of a lab."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()
