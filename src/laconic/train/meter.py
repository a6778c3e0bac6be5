"""Measurements of a training step on one rank.

[Note: Seconds without a wait]
An accelerator works behind the host, so the host's clock tells nothing of a step unless the host waits for the device.
So the meter records an event before a step and one after it, on the stream that computes, and goes on. The device notes
when it passes them. The seconds between are read with the record, when the figures of several steps are combined: the
host then waits for the last of these steps. What runs on other streams and no longer holds up the computation belongs
to the step that will need it. All other figures are the host's own, and complete when it has issued the step: bytes are
counted where transfers are issued, memory where it is allocated.
"""

import time
from collections import Counter
from functools import partial
from typing import Any

import psutil
import torch

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import WIRE_LEVELS, Snapshot
from laconic.lab.counters import InterfaceBytes, interface_bytes, loopback_bytes
from laconic.strategies.stepper import Stepper, StepResult
from laconic.train.records import KINDS, StepRecord

_Interfaces = tuple[InterfaceBytes | None, InterfaceBytes | None]
"""The wire's counters and the loopback's."""


class StepMeter:
    """Measures the time, bytes and memory of steps. Call `fetch`, `start` and `stop` once per step, in this order.

    None of them waits for the device: [Note: Seconds without a wait].

    A step's counters start where the last step's ended, since another rank may send before this rank begins the step.
    """

    def __init__(self, stepper: Stepper, ranks: RankInfo, device: torch.device) -> None:
        self._stepper, self._device = stepper, device
        self._reads_interface = ranks.is_first_on_node
        self._last_interfaces: _Interfaces | None = None
        self._last_traffic: Snapshot | None = None

    def fetch(self) -> None:
        """Start to measure the time to fetch rows, before the step."""
        self._fetch_start_s = time.perf_counter()

    def start(self) -> None:
        """Start to measure the step."""
        self._interfaces = self._last_interfaces or self._read_interfaces()
        self._traffic = self._stepper.traffic(self._last_traffic)
        self._data_s = time.perf_counter() - self._fetch_start_s
        self._begin = moment_on(self._device)

    def stop(self, step: int, lr: float, result: StepResult) -> StepRecord:
        """End the measurement; return the record of the step."""
        end, is_on_cpu = moment_on(self._device), self._device.type == "cpu"
        now = self._last_interfaces = self._read_interfaces()
        wire, loopback = (
            (end - begin).sent if end and begin else None for end, begin in zip(now, self._interfaces, strict=True)
        )
        traffic = self._last_traffic = self._stepper.traffic()
        moved = traffic - self._traffic if traffic is not None and self._traffic is not None else None
        memory = self._stepper.memory()
        return StepRecord(
            step=step,
            lr=lr,
            result=result,
            data_s=self._data_s,
            measured_s=partial(seconds_between, self._begin, end),
            sums={
                "interface_sent_bytes": wire,
                "loopback_bytes": loopback,
                "wait_s": sum(map(moved.waited_s, WIRE_LEVELS)) if moved else None,
                "host_bytes": memory.host_bytes if memory else None,
                **{kind: moved.total(*place, "sent") if moved else None for kind, place in KINDS.items()},
            },
            peaks={
                "device_bytes": memory.device_bytes if memory else None,
                "device_peak_bytes": memory.device_peak_bytes if memory else None,
                "allocated_peak_bytes": None if is_on_cpu else torch.accelerator.max_memory_allocated(self._device),
                "resident_bytes": psutil.Process().memory_info().rss,
            },
            resting=dict(Counter(placement.weights for placement in self._stepper.placements().values())),
        )

    def skip(self) -> None:
        """Ignore the bytes of the interfaces since the last step, for example those of an evaluation."""
        self._last_interfaces = None

    def _read_interfaces(self) -> _Interfaces:
        return (interface_bytes(), loopback_bytes()) if self._reads_interface else (None, None)


def moment_on(device: torch.device) -> Any:
    """The present moment: the host's clock or, on an accelerator, an event behind all that computes so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """The seconds between two moments. Waits until the device has passed both."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
