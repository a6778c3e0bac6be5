"""The parts of every search of this room: lists in messages, buckets by cluster, and an error that all ranks raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.shard.bucket import Bucket

_T = TypeVar("_T")
_SHOWN = 3
"""The names in a message."""


class CorruptionError(RuntimeError):
    """Ranks have other bits than they should: weights or gradients were damaged, or changed unnoticed.

    All ranks of the mesh raise it alike. No optimizer has used the damaged values if the error comes out of a backward.
    """


def some(texts: Sequence[str], *, most: int = _SHOWN, joint: str = ", ", more: str = " and {} more") -> str:
    """The first texts, joined, and the number of those that are left out."""
    left = len(texts) - most
    return joint.join(texts[:most]) + (more.format(left) if left > 0 else "")


def by_cluster(items: Iterable[_T]) -> dict[Cluster, list[_T]]:
    """Items that have a `cluster`, such as buckets, by this cluster, in their order."""
    found: dict[Cluster, list[_T]] = {}
    for item in items:
        cluster: Any = item
        found.setdefault(cluster.cluster, []).append(item)
    return found


def shard_at(cluster: Cluster, place: int) -> int:
    """The shard of the rank at `place` in the order of the island: rank (n, l) owns shard l * N + n."""
    node, local = divmod(place, cluster.num_local)
    return local * cluster.num_nodes + node


def names_in(bucket: Bucket, shard: int) -> str:
    """The parameters that have elements in a shard, and their unit."""
    layout = bucket.layout
    names = [slot.name for index, slot in enumerate(layout.slots) if layout.extent(index, shard) is not None]
    return f"{some(names)} of {bucket.unit_name}"


def raise_together(cluster: Cluster, damage: list[str], *, across_islands: bool) -> None:
    """Raise what any rank has found, on all ranks. Collective over the island, or over all islands."""
    group = cluster.all_flag_group if across_islands else cluster.flag_group
    by_rank = [damage[:_SHOWN]] if group is None else RankGroup(group).gather(damage[:_SHOWN])
    found = [each for theirs in by_rank for each in theirs]
    if found:
        raise CorruptionError(
            f"{some(found, joint='; ', more=' (and {} more)')}. The network, memory or a device has damaged them, or "
            "something changed weights without notice, such as to_local().data; then call invalidate() after the "
            "change, on every rank. Otherwise go on from the last checkpoint, without the machine that is named most"
        )
