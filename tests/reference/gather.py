"""Oracle of gathers and reductions over two levels, in one process. A rank is (node, local); C elements per shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

Rank = tuple[int, int]


def shard_of(rank: Rank, num_nodes: int) -> int:
    """The shard that rank (n, l) owns."""
    node, local = rank
    return local * num_nodes + node


def gather(shards: Mapping[Rank, Tensor]) -> Tensor:
    """The bucket: the shards of all ranks, in the order of shards."""
    num_nodes = 1 + max(node for node, _ in shards)
    return torch.cat([shards[rank] for rank in sorted(shards, key=lambda rank: shard_of(rank, num_nodes))])


def node_shard_of(bucket: Tensor, local: int, num_local: int) -> Tensor:
    """The node shard of rank (any, local): what it holds after the gather across nodes."""
    return bucket.chunk(num_local)[local]


def cut(bucket: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """The shards of a bucket, which may be unequal."""
    return [bucket[sum(numels[:shard]) : sum(numels[: shard + 1])] for shard in range(len(numels))]


def sum_over_ranks(buckets: Mapping[Rank, Tensor]) -> Tensor:
    """The sum of the buckets of all ranks: over the ranks of each node first, then over nodes."""
    num_nodes, num_local = (1 + max(place) for place in zip(*buckets, strict=True))
    per_node = [reduce(torch.add, [buckets[node, local] for local in range(num_local)]) for node in range(num_nodes)]
    return reduce(torch.add, per_node)


def reduce_scatter(buckets: Mapping[Rank, Tensor]) -> dict[Rank, Tensor]:
    """The shard of the sum for every rank."""
    num_nodes = 1 + max(node for node, _ in buckets)
    shards = sum_over_ranks(buckets).chunk(len(buckets))
    return {rank: shards[shard_of(rank, num_nodes)] for rank in buckets}
