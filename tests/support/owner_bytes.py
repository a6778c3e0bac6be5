"""The bytes of matrices on the way to their owners and back: counted, and by formula."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic.optim.owners import Owners
from laconic.ragged.redistribute import whole_on
from laconic.ragged.spec import RaggedSpec


def moved_elements(spec: RaggedSpec, target: RaggedSpec) -> int:
    """Count the elements that cross between ranks when a tensor goes from one cut to another, summed over all ranks."""
    pairs = [(spec.held_by(shard), target.held_by(shard)) for shard in range(spec.layout.num_shards)]
    return sum(new.numel - max(0, min(old.stop, new.stop) - max(old.start, new.start)) for old, new in pairs)


def sum_over_ranks(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def received_bytes(module: nn.Module, optimizer: Any) -> int:
    """The bytes of matrices that all ranks have received so far, over all clusters of the parameters. Collective."""
    clusters = [parameter.spec.cluster for parameter in module.parameters()]  # type: ignore[union-attr]
    clusters += [each.cluster for each in getattr(optimizer, "joined", {}).values()]
    counters = {id(cluster.traffic): cluster.traffic.snapshot() for cluster in clusters}
    return sum_over_ranks(sum(each.total(purpose="optimizer", direction="received") for each in counters.values()))


def elements_to_owners(owners: Owners) -> int:
    """The elements that cross on the way to the owners on all ranks, as layouts say it. Collective.

    Ranks of one cluster have the same matrices, which its first rank counts.
    """
    routes = [(matrix.route, owner) for matrix, owner in owners.by_matrix.items()]
    firsts = [min(map(route.cluster.global_rank, range(route.cluster.size))) for route, _ in routes]
    counted = (each for each, first in zip(routes, firsts, strict=True) if dist.get_rank() == first)
    return sum_over_ranks(sum(moved_elements(route, whole_on(route, owner)) for route, owner in counted))
