"""The bytes and the hops of collectives that follow a ring, as NCCL's and Gloo's do: what each rank sends, by level.

[Note: Rings over nodes]
A ring in rank order enters and leaves each node once. Over each of its edges go (R - 1) / R of the buffer, if R ranks
share it. So a node sends as much over its wire, and as much over each of the edges between its ranks. A `Transfer` has
means over the ranks of a node. Algorithm and bytes: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69(2), 2009; NCCL's ring and Gloo's are the same. Reference:
tests/support/step_bytes.py.

A part of the buffer passes N - 1 wires and all edges inside N nodes, one after the other. A cluster's latencies are of
the smallest collective of a level. So a pass waits for N - 1 latencies of the wire, and for one inside each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laconic.comm.traffic import Level, Purpose
from laconic.plan.buckets import Shape
from laconic.plan.machine import Transfer

Among = Literal["all", "node", "place"]
"""The ranks of a ring: all, those of one node, or those with the same place in all nodes."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of `shape`'s ranks, of those inside a node, or of those with the same place in every node."""

    shape: Shape
    among: Among

    @property
    def size(self) -> int:
        """The number of ranks in the ring."""
        return {"all": self.shape.ranks, "node": self.shape.local, "place": self.shape.nodes}[self.among]

    def gather(self, name: str, purpose: Purpose, nbytes: float) -> Transfer:
        """An all-gather, or a reduce-scatter, of a buffer of `nbytes`: one pass."""
        return self._passes(name, purpose, nbytes, 1)

    def reduce_scatter(self, name: str, purpose: Purpose, nbytes: float) -> Transfer:
        """A reduce-scatter of a buffer of `nbytes`: one pass."""
        return self._passes(name, purpose, nbytes, 1)

    def all_reduce(self, name: str, purpose: Purpose, nbytes: float) -> Transfer:
        """An all-reduce of a buffer of `nbytes`: two passes."""
        return self._passes(name, purpose, nbytes, 2)

    def _passes(self, name: str, purpose: Purpose, nbytes: float, passes: int) -> Transfer:
        nodes, local = self.shape.nodes, self.shape.local
        edge_bytes = passes * (self.size - 1) / self.size * nbytes
        if self.among == "place":
            return Transfer(name=name, purpose=purpose, sent={"node": edge_bytes}, hops=_hops(passes, nodes - 1, 0))
        if self.among == "node" or nodes == 1:
            return Transfer(name=name, purpose=purpose, sent={"local": edge_bytes}, hops=_hops(passes, 0, 1))
        sent: dict[Level, float] = {"node": edge_bytes / local, "local": edge_bytes * (local - 1) / local}
        hops = _hops(passes, nodes - 1, nodes if local > 1 else 0)
        return Transfer(name=name, purpose=purpose, sent=sent, hops=hops)


def _hops(passes: int, node: int, local: int) -> dict[Level, int]:
    return {"node": passes * node, "local": passes * local}
