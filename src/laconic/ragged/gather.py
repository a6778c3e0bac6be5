"""The gather of one whole tensor from its extents, level by level."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from laconic.comm.collectives import Pending
from laconic.comm.journal import described, issue
from laconic.comm.traffic import IslandLevel
from laconic.layout.bucket import Extent
from laconic.ragged.spec import RaggedSpec


def gather_whole(spec: RaggedSpec, part: Tensor) -> Tensor:
    """Gather all elements of `spec`'s slot from the ranks' parts. Collective.

    Shapes: this rank's `part` (n,), on any device -> (numel,), on the device of the cluster or of a meta `part`.
    Cost: each element enters a node shard's ranks once across the nodes and each rank once inside the node, without
        padding; counted as "control". Memory for the result.
    """
    cluster = spec.cluster
    device = part.device if part.is_meta else cluster.device
    whole = part.new_empty(spec.slot.numel, device=device)
    held = spec.extent or Extent(0, 0)
    whole[held.start : held.stop].copy_(part)
    for level, own, runs in _stages(spec):
        group = cluster.gather_groups[level]
        if group is None or part.is_meta:
            continue
        nbytes = [run.numel * part.itemsize for run in runs]
        received = sum(nbytes) - nbytes[own]
        cluster.traffic.count(level, "control", sent_bytes=nbytes[own] * (len(runs) - 1), received_bytes=received)
        senders = [rank for rank, run in enumerate(runs) if run.numel]
        ticket = issue(group, "the whole", spec.slot.name, senders=senders)
        works = [
            dist.broadcast(whole[run.start : run.stop], group=group, group_src=rank, async_op=True)
            for rank, run in enumerate(runs)
            if run.numel
        ]
        Pending(works, cluster.traffic, level, described(*ticket.label), ticket).wait()
    return whole


def _stages(spec: RaggedSpec) -> Iterator[tuple[IslandLevel, int, list[Extent]]]:
    """For each level: this rank's place on it, and the run that each rank of the level has by then.

    First the ranks of one place in their nodes join their extents: a node shard's run. Then the ranks of one node join
    these. Shards, and so the runs of node shards, come in order: [Note: A bucket's order] in shard/bucket.py.
    """
    cluster, num_nodes = spec.cluster, spec.cluster.num_nodes
    extents = [spec.layout.extent(spec.index, shard) for shard in range(cluster.size)]
    node_shards = [extents[begin : begin + num_nodes] for begin in range(0, cluster.size, num_nodes)]
    yield "node", cluster.node_rank, [extent or Extent(0, 0) for extent in node_shards[cluster.local_rank]]
    yield "local", cluster.local_rank, [_joined(own) for own in node_shards]


def _joined(extents: list[Extent | None]) -> Extent:
    held = [extent for extent in extents if extent is not None]
    return Extent(held[0].start, held[-1].stop) if held else Extent(0, 0)
