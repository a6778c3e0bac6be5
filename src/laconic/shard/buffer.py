"""The buffers of a bucket: how each lies over the ranks, the moves between them, and the memory that a ledger counts.

[Note: Spreads]
Along each axis a buffer is cut (each rank has its part), whole (all have all of it) or partial (each has a term of a
sum). A move changes it along one axis, and the change says which transfer that is:

| from | to | transfer |
|---|---|---|
| cut | whole | all-gather |
| partial | cut | reduce-scatter |
| partial | whole | all-reduce |

Weights go the way of `GATHER`, from shard over node shard to full buffer, and gradients that of `REDUCTION`. A buffer
may rest at any spread on its way: a cache keeps a node shard; sums of a node, or of an island, wait there for a later
micro-batch. Inside a node everything is exact. Across nodes and islands the wire may code what moves: shard/crossing.py
has the ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from laconic.comm.traffic import Level
from laconic.shard.ledger import Ledger


class Along(Enum):
    """How a buffer lies along one axis."""

    CUT = "cut"
    WHOLE = "whole"
    PARTIAL = "partial"


LEVELS: tuple[Level, ...] = ("island", "node", "local")
"""The axes of a mesh, the slowest first."""
_CUT, _WHOLE, _PARTIAL = Along.CUT, Along.WHOLE, Along.PARTIAL
_TRANSFERS = {(_CUT, _WHOLE): "all-gather", (_PARTIAL, _CUT): "reduce-scatter", (_PARTIAL, _WHOLE): "all-reduce"}


class Spread(NamedTuple):
    """How a buffer lies over the ranks: [Note: Spreads]."""

    island: Along
    node: Along
    local: Along


SHARD = Spread(island=_WHOLE, node=_CUT, local=_CUT)
"""Weights at rest, and `.grad`: (C,) on each rank."""
NODE_SHARD = Spread(island=_WHOLE, node=_WHOLE, local=_CUT)
"""Weights that have crossed: (N * C,)."""
FULL = Spread(island=_WHOLE, node=_WHOLE, local=_WHOLE)
"""Gathered weights: (L * N * C,)."""
AS_THEY_COME = Spread(island=_PARTIAL, node=_PARTIAL, local=_PARTIAL)
"""The gradients of one rank: (L * N * C,)."""
NODE_SUMS = Spread(island=_PARTIAL, node=_PARTIAL, local=_CUT)
"""Sums of the gradients of a node: (N * C,)."""
ISLAND_SUMS = Spread(island=_PARTIAL, node=_CUT, local=_CUT)
"""Sums of the gradients of an island: (C,)."""


class Leg(NamedTuple):
    """A move of a buffer along one axis."""

    level: Level
    source: Spread
    target: Spread
    transfer: str
    """See [Note: Spreads]."""


def legs_of(way: Sequence[Spread]) -> tuple[Leg, ...]:
    """The moves along a way, each of which changes one axis.

    Raises:
        ValueError: two neighbours differ along several axes, or no transfer makes one of the other.
    """
    legs = []
    for source, target in pairwise(way):
        ends = zip(LEVELS, source, target, strict=True)
        changed = [(level, (old, new)) for level, old, new in ends if old is not new]
        if len(changed) != 1 or changed[0][1] not in _TRANSFERS:
            raise ValueError(f"no transfer along one axis makes {target} of {source}; name the spreads in between")
        legs.append(Leg(changed[0][0], source, target, _TRANSFERS[changed[0][1]]))
    return tuple(legs)


GATHER = legs_of((SHARD, NODE_SHARD, FULL))
REDUCTION = legs_of((AS_THEY_COME, NODE_SUMS, ISLAND_SUMS, SHARD))


class Counted:
    """Memory of the engine: the ledger counts its bytes from now on until `free`."""

    def __init__(self, nbytes: int, ledger: Ledger, *, on_host: bool = False) -> None:
        self.nbytes, self._ledger, self._on_host = nbytes, ledger, on_host
        self.is_held = True
        """True while the ledger counts it."""
        if on_host:
            ledger.host_bytes += nbytes
            return
        ledger.device_bytes += nbytes
        if ledger.device_bytes > ledger.device_peak_bytes or ledger.is_watched:  # seldom, and else without a call
            ledger.note_peak()

    def free(self) -> None:
        """Count it no more."""
        if self.is_held:
            self.is_held = False
            if self._on_host:
                self._ledger.host_bytes -= self.nbytes
            else:
                self._ledger.device_bytes -= self.nbytes  # no peak rises, so without a call


class Buffer(Counted):
    """A flat tensor on the device that the engine holds until `free`."""

    def __init__(self, memory: Tensor, ledger: Ledger) -> None:
        self.memory = memory
        """The tensor. `free` takes the attribute away."""
        super().__init__(memory.nbytes, ledger)

    def free(self) -> None:
        """Drop the memory: it goes with the last view of it."""
        if self.is_held:
            del self.memory
            self.is_held = False
            self._ledger.device_bytes -= self.nbytes

    def empty(self) -> None:
        """Free the memory at once, in place: views stay, and have memory again after `fill`."""
        self.memory.untyped_storage().resize_(0)
        self.is_held = False
        self._ledger.device_bytes -= self.nbytes

    def fill(self) -> None:
        """Allocate the memory again, with any values."""
        self.memory.untyped_storage().resize_(self.nbytes)
        self.is_held = True
        ledger = self._ledger
        ledger.device_bytes += self.nbytes
        if ledger.device_bytes > ledger.device_peak_bytes or ledger.is_watched:
            ledger.note_peak()
