"""The policy of islands that come and go without a restart of the others."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Islands that come and go while the others train on: [Note: Islands that come and go] in islands/elastic.py.

    Each island is a job of its own, with its own torchrun. The islands meet at a rendezvous, a small server that none
    of them hosts: `laconic rendezvous`.

    Raises:
        ValueError: a value is out of its range.
    """

    rendezvous: str
    """The address of the rendezvous, "HOST:PORT"."""
    islands: int
    """The number of islands with which training starts. Later any number may come and go."""
    quorum: int | None = None
    """The number of islands that must have taken all steps up to a sync before the sync begins. All others then join
    it after the step in which they are, so nobody waits for a slow island; the mean weighs islands by their tokens.
    Until then fast islands train on. None: every island takes the same number of steps, and the islands wait for each
    other at every sync."""
    timeout_s: float = 120.0
    """The longest, in seconds, that islands wait for one of them at a sync. Then they go on without that island. It
    must be longer than islands are apart, and longer than the largest message takes. An island whose process dies is
    noticed earlier."""
    start_timeout_s: float = 1800.0
    """The longest, in seconds, that an island waits to enter, and for the state of the others."""

    def __post_init__(self) -> None:
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"rendezvous={self.rendezvous!r} must be HOST:PORT, where `laconic rendezvous` runs")
        if self.islands < 1:
            raise ValueError(f"islands={self.islands} must be positive: training starts with so many islands")
        if self.quorum is not None and self.quorum < 1:
            raise ValueError(f"quorum={self.quorum} must be positive; None lets islands wait for each other")
        if not (self.timeout_s > 0 and self.start_timeout_s > 0):
            raise ValueError(f"timeout_s={self.timeout_s} and start_timeout_s={self.start_timeout_s} must be positive")

    @property
    def host(self) -> str:
        """The host of the rendezvous; an IPv6 address without its brackets."""
        return self.rendezvous.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the rendezvous."""
        return int(self.rendezvous.rpartition(":")[2])
