"""What a rank sends in a collective in which all ranks do alike: bytes and latencies by level.

[Note: Rings over nodes]
NCCL and Gloo move collectives of large tensors along a ring in rank order. It enters and leaves each node once. Over
each of its edges go (R - 1) / R of the buffer in one pass, if R ranks share it. A gather and a reduce-scatter are one
pass, an all-reduce two. So a node sends as much over its wire as over each of the edges between its ranks. Algorithm
and bytes: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
Reference: tests/support/step_bytes.py.

A part of the buffer passes all edges but one, one after the other. A cluster's latencies are of the smallest collective
of a level. So a pass waits for all wires but one, and once inside each node that has several ranks of the ring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from laconic.comm.traffic import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a rank sends, as a mean over all ranks that do alike."""

    sent: Mapping[Level, float] = field(default_factory=dict)
    """Bytes on each level."""
    hops: Mapping[Level, float] = field(default_factory=dict)
    """The latencies of each level that pass one after the other."""

    def times(self, count: int) -> Route:
        """The route of `count` messages, one after the other."""
        if count == 1:
            return self
        sent, hops = ({level: count * each for level, each in by.items()} for by in (self.sent, self.hops))
        return Route(sent=sent, hops=hops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where ranks are, by their numbers: island by island, and there node by node."""

    nodes: int
    """The nodes of an island."""
    local: int
    """The ranks of a node."""
    islands: int = 1

    @property
    def ranks(self) -> int:
        """The ranks of one island."""
        return self.nodes * self.local

    def level_between(self, rank: int, other: int) -> Level:
        """The level on which two ranks talk."""
        if rank // self.local == other // self.local:
            return "local"
        return "node" if rank // self.ranks == other // self.ranks else "island"


class Ring:
    """A ring of ranks, in their order: [Note: Rings over nodes]."""

    def __init__(self, ranks: Sequence[int], places: Places) -> None:
        self._ranks, self._places = ranks, places
        self._edges: dict[int, Counter[Level]] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    def gather(self, nbytes: float) -> Route:
        """An all-gather of a whole buffer of `nbytes`."""
        return self._passes(nbytes, 1)

    def reduce_scatter(self, nbytes: float) -> Route:
        """A reduce-scatter of a whole buffer of `nbytes`."""
        return self._passes(nbytes, 1)

    def all_reduce(self, nbytes: float) -> Route:
        """An all-reduce of a buffer of `nbytes`."""
        return self._passes(nbytes, 2)

    def message(self, nbytes: float, offset: int) -> Route:
        """A message from every rank to that which is `offset` places further."""
        shares = {level: count / self.size for level, count in self._between(offset).items()}
        return Route(sent={level: share * nbytes for level, share in shares.items()}, hops=shares)

    def _passes(self, nbytes: float, passes: int) -> Route:
        if self.size == 1:
            return Route()
        edges, edge_bytes = self._between(1), passes * (self.size - 1) / self.size * nbytes
        hops: dict[Level, float] = dict(edges)
        farthest: Level = "island" if edges["island"] else "node"
        hops[farthest] = max(0, edges[farthest] - 1)
        if edges["local"]:  # else all edges are wires
            hops["local"] = self._num_nodes
        return Route(
            sent={level: edge_bytes * count / self.size for level, count in edges.items()},
            hops={level: passes * count for level, count in hops.items()},
        )

    @cached_property
    def _num_nodes(self) -> int:
        return len({rank // self._places.local for rank in self._ranks})

    def _between(self, offset: int) -> Counter[Level]:
        """The number of ranks, by the level on which they send to the rank that is `offset` places further."""
        if offset not in self._edges:
            ranks, size = self._ranks, self.size
            levels = (self._places.level_between(ranks[i], ranks[(i + offset) % size]) for i in range(size))
            self._edges[offset] = Counter(levels)
        return self._edges[offset]
