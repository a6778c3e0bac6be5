"""What one device did in its steps, as it happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_LATE = 0.1  # of an op's own duration: to wait longer than that is to be late
_TRACE_LENGTH = 1 << 16


@dataclass
class Report:
    """Counters of one device; the last step's, unless said otherwise."""

    live_now: int = 0
    """Stage activations alive on this device: forwards whose backward has not run."""
    live_peak: int = 0
    """The most, since the beginning."""
    bytes_per_step: list[int] = field(default_factory=lambda: [0])
    """Bytes sent before the first op of the last step, and after each."""
    largest_burst: int = 0
    """The largest of them, since the beginning."""
    durations_s: list[float] = field(default_factory=list)
    """Of each op of the last step, without waiting."""
    waits_s: list[float] = field(default_factory=list)
    """Stood still for messages before each op of the last step."""
    trace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_TRACE_LENGTH))
    """(time.monotonic(), stage activations alive from then on), the latest; those of one machine's devices can be
    merged by `peak_together`."""

    @property
    def on_time(self) -> float:
        """The share of the last step's time steps for which this device did not wait, save for a tenth of an op."""
        if not self.durations_s:
            return 1.0
        patience = _LATE * sum(self.durations_s) / len(self.durations_s)
        return sum(wait <= patience for wait in self.waits_s) / len(self.waits_s)

    def begin_step(self) -> None:
        """Forget the last step."""
        self.bytes_per_step, self.durations_s, self.waits_s = [0], [], []

    def live(self, change: int) -> None:
        """An activation has come, or gone."""
        self.live_now += change
        self.live_peak = max(self.live_peak, self.live_now)
        self.trace.append((time.monotonic(), self.live_now))

    def op(self, *, duration_s: float, wait_s: float) -> None:
        """An op has run."""
        self.durations_s.append(duration_s)
        self.waits_s.append(wait_s)
        self.bytes_per_step.append(0)

    def sent(self, num_bytes: int) -> None:
        """After the last op, or before the next one: that is one moment."""
        self.bytes_per_step[-1] += num_bytes
        self.largest_burst = max(self.largest_burst, self.bytes_per_step[-1])

    def clear_trace(self) -> None:
        """Begin the trace, and the peaks, anew."""
        self.trace.clear()
        self.live_peak, self.largest_burst = self.live_now, 0


def peak_together(traces: Sequence[Iterable[tuple[float, int]]], since: float = 0.0) -> int:
    """The most stage activations alive at one moment over several devices of one machine, from a moment on."""
    events = sorted((moment, device, alive) for device, trace in enumerate(traces) for moment, alive in trace)
    alive_on, peak = dict.fromkeys(range(len(traces)), 0), 0
    for moment, device, alive in events:
        alive_on[device] = alive
        if moment >= since:
            peak = max(peak, sum(alive_on.values()))
    return peak
