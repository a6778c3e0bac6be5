"""Who trains what: the islands that hold each slice, counted when islands form.

A drift is averaged over the islands that trained the coordinate, not over all. A slice that nobody holds, because its
islands were lost, stays where it is, and its outer momentum with it, until somebody takes it up again.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from laconic.comm.cluster import Cluster
from laconic.ragged.parts import slice_of_parameters

_NONE = -1


class Holders:
    """Counts of islands per parameter of a model with partial updates; of any other, all islands hold everything."""

    def __init__(self, model: nn.Module, cluster: Cluster) -> None:
        """Collective over islands."""
        self._islands = cluster.num_islands
        self._slices = {name: slice for name, slice in slice_of_parameters(model).items() if slice is not None}
        trained = {
            self._slices[name] for name, p in model.named_parameters() if name in self._slices and p.requires_grad
        }
        own = torch.tensor([trained.pop() if len(trained) == 1 else _NONE])
        every = [torch.empty_like(own) for _ in range(self._islands)]
        if cluster.island_group is not None:
            dist.all_gather(every, own, group=cluster.island_group)
        else:
            every = [own]
        self._counts = Counter(int(one) for one in every)

    def is_synced(self, name: str, parameter: nn.Parameter) -> bool:
        """True if some island may train the parameter."""
        return parameter.requires_grad or name in self._slices

    def count(self, name: str) -> int:
        """Islands that train the parameter."""
        return self._counts[self._slices[name]] if name in self._slices else self._islands
