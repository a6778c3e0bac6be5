"""Bytes by level, purpose and direction, counted where they are sent.

Every collective of the engine reports here what it puts on its level, so that a run's traffic is a sum of facts, not an
estimate. In the lab the sum over a node's ranks is held to the kernel's interface counters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["island", "node", "local"]
"""`island` and `node` cross the wire between machines; `local` stays inside one."""
Purpose = Literal["weights", "gradients", "activations", "optimizer", "outer", "control"]
"""`activations` is what stages on different devices hand on, `optimizer` what optimizers that need whole matrices move,
`outer` what islands tell each other of their drift, `control` everything small: norms, losses, agreement between ranks;
and what a user gathers by hand."""
Direction = Literal["sent", "received"]

WIRE_LEVELS: tuple[Level, ...] = ("island", "node")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank had moved, and how long it had waited, at one moment. Subtract two for an interval."""

    sizes: Mapping[tuple[Level, Purpose, Direction], int] = field(default_factory=dict)
    """Bytes by (level, purpose, direction)."""
    waits: Mapping[Level, float] = field(default_factory=dict)
    """Seconds this rank's thread stood still for a level. On CUDA waiting happens on the device and is not seen
    here."""

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        return Snapshot(
            sizes={key: size - earlier.sizes.get(key, 0) for key, size in self.sizes.items()},
            waits={level: wait - earlier.waits.get(level, 0.0) for level, wait in self.waits.items()},
        )

    def total(
        self, level: Level | None = None, purpose: Purpose | None = None, direction: Direction | None = None
    ) -> int:
        """Bytes of every entry that matches; None matches all."""
        wanted = (level, purpose, direction)
        return sum(
            size
            for key, size in self.sizes.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        )

    def wire(self, direction: Direction = "sent", purpose: Purpose | None = None) -> int:
        """Bytes that crossed between machines."""
        return sum(self.total(level, purpose, direction) for level in WIRE_LEVELS)

    def waited_s(self, level: Level | None = None) -> float:
        """Seconds spent waiting for a level, or for all of them."""
        return sum(wait for key, wait in self.waits.items() if level is None or key == level)


class Traffic:
    """The counters of one rank in one cluster."""

    def __init__(self) -> None:
        self._sizes: Counter[tuple[Level, Purpose, Direction]] = Counter()
        self._waits: Counter[Level] = Counter()

    def count(self, level: Level, purpose: Purpose, *, sent_bytes: int, received_bytes: int) -> None:
        """Add one transfer as this rank sees it."""
        self._sizes[level, purpose, "sent"] += sent_bytes
        self._sizes[level, purpose, "received"] += received_bytes

    @contextmanager
    def waiting(self, level: Level) -> Iterator[None]:
        """Time the body as waiting for `level`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waits[level] += time.perf_counter() - start  # type: ignore[assignment]

    def snapshot(self) -> Snapshot:
        """The counters now; immutable."""
        return Snapshot(sizes=dict(self._sizes), waits=dict(self._waits))

    def waited_s(self, level: Level | None = None) -> float:
        """Seconds waited since the beginning."""
        return self.snapshot().waited_s(level)
