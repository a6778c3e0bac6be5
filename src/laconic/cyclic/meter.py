"""What one device measures while it trains: live activations, the bytes sent, durations and waits."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """The counters of one device. They cover the last step, unless said otherwise."""

    live_now: int = 0
    """The number of stage activations alive on this device: forwards whose backward has not run."""
    live_peak: int = 0
    """The largest `live_now` since the beginning."""
    bytes_per_step: list[int] = field(default_factory=lambda: [0])
    """The bytes sent before the first op, and after each op."""
    durations_s: list[float] = field(default_factory=list)
    """The duration of each op, without the wait before it."""
    waits_s: list[float] = field(default_factory=list)
    """The time that the device waited for messages before each op."""

    def add_live(self, change: int) -> None:
        """Record that a stage activation was made (+1) or freed (-1)."""
        self.live_now += change
        self.live_peak = max(self.live_peak, self.live_now)
