"""Traffic: bytes by level, purpose and direction, counted where they are sent.

Every collective of laconic counts its own bytes, so the traffic of a run is counted, not estimated. Tests in
the lab compare the sum over the ranks of a node with the kernel's interface counters. Of a transfer that is made again
and again, only the times are counted: who asks multiplies them by its bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from laconic.comm.journal import Ticket
from laconic.comm.watch import waiting_for

Level = Literal["island", "node", "local"]
"""`island` and `node` cross the wire between nodes; `local` stays inside a node."""
IslandLevel = Literal["node", "local"]
"""The levels between the ranks of one island."""
Purpose = Literal["weights", "gradients", "activations", "optimizer", "outer", "control"]
"""The reason for a transfer:

- `weights`: parameters for forward and backward;
- `gradients`: gradients of parameters;
- `activations`: activations, and their gradients, between stages on different devices;
- `optimizer`: matrices for optimizers that need whole matrices;
- `outer`: pseudo-gradients between islands;
- `control`: small messages (norms, losses, buffers, agreement between ranks), and tensors that the user gathers."""
Direction = Literal["sent", "received"]
"""`sent` leaves the rank that counts; `received` enters it."""

LevelBytes = tuple[Level, Purpose, int, int]
"""The bytes that a transfer sends on a level, and those that it receives, with their purpose."""

WIRE_LEVELS: tuple[Level, ...] = ("island", "node")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The counters of one rank at one moment. The difference of two snapshots is the traffic between them."""

    sizes: Mapping[tuple[Level, Purpose, Direction], int] = field(default_factory=dict)
    """Bytes by (level, purpose, direction)."""
    waits: Mapping[Level, float] = field(default_factory=dict)
    """Seconds that this rank's thread was blocked, by level. With NCCL the device waits, and nothing is counted."""

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        return Snapshot(
            sizes={key: size - earlier.sizes.get(key, 0) for key, size in self.sizes.items()},
            waits={level: wait - earlier.waits.get(level, 0.0) for level, wait in self.waits.items()},
        )

    def total(
        self, level: Level | None = None, purpose: Purpose | None = None, direction: Direction | None = None
    ) -> int:
        """Sum the bytes of every entry that matches; None matches everything."""
        wanted = (level, purpose, direction)
        return sum(
            size
            for key, size in self.sizes.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        )

    def wire(self, direction: Direction = "sent", purpose: Purpose | None = None) -> int:
        """Sum the bytes that crossed the wire between nodes."""
        return sum(self.total(level, purpose, direction) for level in WIRE_LEVELS)

    def waited_s(self, level: Level | None = None) -> float:
        """Return the seconds of waiting for `level`; None sums all levels."""
        return sum(wait for key, wait in self.waits.items() if level is None or key == level)


class Traffic:
    """The counters of one rank in one cluster. They start at zero."""

    observer: ClassVar[Callable[[Level, Purpose, int], None] | None] = None
    """Gets the level, the purpose and the bytes sent of each transfer of all clusters, before it begins."""

    def __init__(self) -> None:
        self.begun: Counter[tuple[LevelBytes, ...]] = Counter()
        """How often transfers began again, by their bytes on each level."""
        self._sizes: Counter[tuple[Level, Purpose, Direction]] = Counter()
        """The bytes of all others: see `Snapshot.sizes`."""
        self.waits: defaultdict[Level, float] = defaultdict(float)
        """See `Snapshot.waits`."""

    def count(self, level: Level, purpose: Purpose, *, sent_bytes: int, received_bytes: int) -> None:
        """Add the bytes that one transfer sends from this rank and brings to it."""
        self._sizes[level, purpose, "sent"] += sent_bytes
        self._sizes[level, purpose, "received"] += received_bytes
        if Traffic.observer is not None:
            Traffic.observer(level, purpose, sent_bytes)

    def waiting(self, level: Level, transfer: object = "a message", ticket: Ticket | None = None) -> waiting_for:
        """Count the duration of a block as waiting for `level`. `transfer` says for what; see `waiting_for`."""
        return waiting_for(transfer, ticket, self.waits, level)

    def snapshot(self) -> Snapshot:
        """Read the counters. The snapshot does not change afterwards."""
        sizes = self._sizes.copy()
        for counted, times in list(self.begun.items()):
            for level, purpose, sent_bytes, received_bytes in counted:
                sizes[level, purpose, "sent"] += times * sent_bytes
                sizes[level, purpose, "received"] += times * received_bytes
        return Snapshot(sizes=dict(sizes), waits=dict(self.waits))
