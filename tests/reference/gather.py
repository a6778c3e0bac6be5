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


def cut(bucket: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """The shards of a bucket, which may be unequal."""
    return [bucket[sum(numels[:shard]) : sum(numels[: shard + 1])] for shard in range(len(numels))]


def sum_over_ranks(buckets: Mapping[Rank, Tensor]) -> Tensor:
    """The sum of the buckets of all ranks: over the ranks of each node first, then over nodes."""
    num_nodes, num_local = (1 + max(place) for place in zip(*buckets, strict=True))
    per_node = [reduce(torch.add, [buckets[node, local] for local in range(num_local)]) for node in range(num_nodes)]
    return reduce(torch.add, per_node)
