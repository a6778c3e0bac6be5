"""Where the elements of one tensor live: a slot of a bucket's layout, cut over a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.layout.bucket import BucketLayout, Extent, Slot
from laconic.layout.derived import DerivedLayout
from laconic.layout.selected import SelectedLayout
from laconic.ragged.dtensor import DTensorShard


@dataclass(frozen=True, kw_only=True)
class RaggedSpec:
    """The layout of one RaggedTensor: slot `index` of `layout`, cut over the ranks of `cluster`.

    Two specs are equal if they cut tensors of one shape alike over the same `Cluster` object.
    """

    cluster: Cluster
    layout: BucketLayout | DerivedLayout | SelectedLayout
    index: int
    dtensor: DTensorShard | None = None
    """This rank's shard of a DTensor, which `layout` cuts further: [Note: Two parallelisms, two meshes] in
    ragged/dtensor.py. None for a tensor that only `layout` cuts."""

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedSpec:
        return self  # immutable, and asynchronous checkpoints copy tensors with their attributes

    @property
    def slot(self) -> Slot:
        """The tensor's place in the layout. Its shape is that of the DTensor shard, if there is one."""
        return self.layout.slots[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.slot.shape if self.dtensor is None else self.dtensor.shape

    @property
    def extent(self) -> Extent | None:
        """The run of flattened elements of the slot that this rank holds; None if it holds nothing."""
        return self.layout.extent(self.index, self.cluster.shard_index)

    @property
    def outer_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks along each outer axis; none for a tensor that only `layout` cuts."""
        return () if self.dtensor is None else self.dtensor.outer_groups

    def part_of(self, whole: Tensor) -> Tensor:
        """Select this rank's flat part of a plain tensor of the global shape: a view if `whole` is contiguous."""
        whole = whole if self.dtensor is None else self.dtensor.part_of(whole)
        extent = self.extent or Extent(0, 0)
        return whole.reshape(-1)[extent.start : extent.stop]

    def assemble(self, whole: Tensor) -> Tensor:
        """View all elements of the slot, flat, in the slot's shape; the result is a DTensor if the tensor was one."""
        whole = whole.view(self.slot.shape)
        return whole if self.dtensor is None else self.dtensor.to_dtensor(whole)
