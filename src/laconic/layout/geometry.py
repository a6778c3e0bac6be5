"""Where shards lie in the buffers of one rank: [Note: A bucket's order] in shard/bucket.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from laconic.layout.bucket import BucketLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """Where shards lie in a rank's node shard, (N * C,), and in the full buffer, (L * N * C,), in elements."""

    peers: range
    """The shards of this rank's node shard, in the order of nodes."""
    numel: int
    """The elements of this rank's shard."""
    node_numel: int
    """Of its node shard."""
    whole_numel: int
    """Of the full buffer."""
    own_in_node: slice
    """This rank's shard in its node shard."""
    node_in_whole: slice
    """Its node shard in the full buffer."""
    numels_on: dict[str, list[int] | None]
    """The elements of each rank's part on a level: of the node shard on "node", of the full buffer on "local". None if
    they are equal. On an island's level nothing is cut."""
    slices: dict[int, list[slice]]
    """The elements of each tensor in the shard, the node shard and the full buffer, by the number of their elements."""
    by_node_shard: tuple[tuple[int, ...], ...]
    """The elements of the shards in each of the L node shards; where they are equal, those of the first."""

    @classmethod
    def of(cls, layout: BucketLayout, *, shard: int, num_nodes: int) -> Geometry:
        """The geometry for the rank that has `shard`, on `num_nodes` nodes."""
        start, first = layout.start, shard // num_nodes * num_nodes
        peers = range(first, first + num_nodes)
        begin, end = start(first), start(first + num_nodes)
        borders = [list(map(start, range(each, each + num_nodes + 1))) for each in _firsts(layout, num_nodes)]
        by_node_shard = tuple(tuple(stop - begin for begin, stop in pairwise(each)) for each in borders)
        numels_on: dict[str, list[int] | None] = dict.fromkeys(("island", "node", "local"))
        if layout.stops:
            numels_on["node"] = list(by_node_shard[shard // num_nodes])
            numels_on["local"] = list(map(sum, by_node_shard))
        slices = {
            stop - begin: [
                slice(max(0, slot.offset - begin), max(0, slot.offset + slot.numel - begin)) for slot in layout.slots
            ]
            for begin, stop in ((0, layout.numel), (begin, end), (start(shard), start(shard + 1)))
        }
        return cls(
            peers=peers,
            slices=slices,
            numel=layout.size(shard),
            node_numel=end - begin,
            whole_numel=layout.numel,
            own_in_node=slice(start(shard) - begin, start(shard + 1) - begin),
            node_in_whole=slice(begin, end),
            numels_on=numels_on,
            by_node_shard=by_node_shard,
        )

    @property
    def most_node_numel(self) -> int:
        """The most elements that the node shard of any rank has, alike on all ranks.

        Choices that all ranks must make alike go by this number.
        """
        return max(map(sum, self.by_node_shard))

    @property
    def most_others_numel(self) -> int:
        """The most elements of other ranks that the node shard of any rank has, alike on all ranks."""
        return max(sum(numels) - min(numels) for numels in self.by_node_shard)


def _firsts(layout: BucketLayout, num_nodes: int) -> Sequence[int]:
    """The first shard of each node shard that is unlike the others."""
    return range(0, layout.num_shards if layout.stops else num_nodes, num_nodes)
