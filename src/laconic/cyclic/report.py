"""Measurements of one device while it trains: live activations, bytes sent, durations and waits."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_LATE = 0.1  # a device is late if it waits longer than this share of an op's mean duration
_TRACE_LENGTH = 1 << 16  # the number of latest changes that the trace keeps


@dataclass
class Report:
    """The counters of one device. They cover the last step, unless said otherwise."""

    live_now: int = 0
    """The number of stage activations alive on this device: forwards whose backward has not run."""
    live_peak: int = 0
    """The largest `live_now` since the beginning."""
    bytes_per_step: list[int] = field(default_factory=lambda: [0])
    """The bytes sent before the first op, and after each op."""
    largest_burst: int = 0
    """The largest number of bytes sent between two ops, since the beginning. The two may be of different batches."""
    durations_s: list[float] = field(default_factory=list)
    """The duration of each op, without the wait before it."""
    waits_s: list[float] = field(default_factory=list)
    """The time that the device waited for messages before each op."""
    trace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_TRACE_LENGTH))
    """The latest changes of `live_now`, as (time.monotonic(), value). `peak_together` merges the traces of devices."""
    _burst: int = 0  # the bytes sent since the last op

    @property
    def on_time(self) -> float:
        """The share of ops before which this device waited at most a tenth of an op's mean duration."""
        if not self.durations_s:
            return 1.0
        patience_s = _LATE * sum(self.durations_s) / len(self.durations_s)
        return sum(wait_s <= patience_s for wait_s in self.waits_s) / len(self.waits_s)

    def begin_step(self) -> None:
        """Clear the counters of the last step."""
        self.bytes_per_step, self.durations_s, self.waits_s = [0], [], []

    def add_live(self, change: int) -> None:
        """Record that a stage activation was made (+1) or freed (-1)."""
        self.live_now += change
        self.live_peak = max(self.live_peak, self.live_now)
        self.trace.append((time.monotonic(), self.live_now))

    def add_op(self, *, duration_s: float, wait_s: float) -> None:
        """Record that an op has run."""
        self.durations_s.append(duration_s)
        self.waits_s.append(wait_s)
        self.bytes_per_step.append(0)
        self._burst = 0

    def add_sent(self, num_bytes: int) -> None:
        """Record bytes that were sent since the last op."""
        self.bytes_per_step[-1] += num_bytes
        self._burst += num_bytes
        self.largest_burst = max(self.largest_burst, self._burst)

    def clear_trace(self) -> None:
        """Clear the trace and the peaks."""
        self.trace.clear()
        self.live_peak, self.largest_burst = self.live_now, 0


def peak_together(traces: Sequence[Iterable[tuple[float, int]]], since: float = 0.0) -> int:
    """The largest number of stage activations alive at one moment on several devices of one machine.

    `traces` has the `Report.trace` of each device. Moments before `since`, a time.monotonic(), do not count.
    """
    events = sorted((moment, device, alive) for device, trace in enumerate(traces) for moment, alive in trace)
    alive_on, peak = dict.fromkeys(range(len(traces)), 0), 0
    for moment, device, alive in events:
        alive_on[device] = alive
        if moment >= since:
            peak = max(peak, sum(alive_on.values()))
    return peak
