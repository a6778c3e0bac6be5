"""Where the elements of one tensor live: a slot of a bucket's layout, cut over a cluster; its placements for torch.

[Note: RaggedTensors are DTensors]
RaggedTensor is a subclass of torch's DTensor, because the ecosystem recognises sharded parameters by
`isinstance(parameter, DTensor)`: torch's state dicts, optimizers and checkpoints, accelerate, transformers, peft.
Its operations are its own: torch asks `__torch_dispatch__` of the subclass first, also when DTensors take part. It has
no DTensorSpec, since none describes runs of elements; code that asks for `_spec` gets an error.

Such code cuts a whole tensor in two ways, and both work without a change of torch. `distribute_tensor(whole, mesh,
placements)` makes a DTensor of torch's own that is cut by Shard(0). RaggedTensors copy from such a DTensor, and
optimizer state is cut again when it is loaded (ragged/optimizer_state.py). The other way is `to_local().copy_(box)`,
where the box is cut out of the whole by `RaggedShard`: `LocalPart` takes its elements from there.

On the meta device there are no elements, and torch makes new tensors from what it reads. There a RaggedTensor looks
like a DTensor with Shard(0), so that these tensors are right.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.layout.bucket import BucketLayout, Extent, RunsLayout, Slot
from laconic.ragged.dtensor import DTensorShard


@dataclass(frozen=True, kw_only=True)
class RaggedSpec:
    """The layout of one RaggedTensor: slot `index` of `layout`, cut over the ranks of `cluster`.

    Two specs are equal if they cut tensors of one shape alike over the same `Cluster` object.
    """

    cluster: Cluster
    layout: BucketLayout | RunsLayout
    index: int
    dtensor: DTensorShard | None = None
    """This rank's shard of a DTensor, which `layout` cuts further: [Note: Two parallelisms, two meshes] in
    ragged/dtensor.py. None for a tensor that only `layout` cuts."""

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedSpec:
        return self  # immutable, and asynchronous checkpoints copy tensors with their attributes

    @cached_property
    def slot(self) -> Slot:
        """The tensor's place in the layout. Its shape is that of the DTensor shard, if there is one."""
        return self.layout.slots[self.index]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.slot.shape if self.dtensor is None else self.dtensor.shape

    @property
    def extent(self) -> Extent | None:
        """The run of flattened elements of the slot that this rank holds; None if it holds nothing."""
        return self.layout.extent(self.index, self.cluster.shard_index)

    def held_by(self, shard: int) -> Extent:
        """The run of flattened elements of the slot that a shard holds; an empty one if it holds nothing."""
        return self.layout.extent(self.index, shard) or Extent(0, 0)

    @property
    def held(self) -> Extent:
        """The run that this rank holds; an empty one if it holds nothing."""
        return self.held_by(self.cluster.shard_index)

    @property
    def outer_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks along each outer axis; none for a tensor that only `layout` cuts."""
        return () if self.dtensor is None else self.dtensor.outer_groups

    def part_of(self, whole: Tensor) -> Tensor:
        """Select this rank's flat part of a plain tensor of the global shape: a view if `whole` is contiguous."""
        whole = whole if self.dtensor is None else self.dtensor.part_of(whole)
        held = self.held
        return whole.reshape(-1)[held.start : held.stop]

    def assemble(self, whole: Tensor) -> Tensor:
        """View all elements of the slot, flat, in the slot's shape; the result is a DTensor if the tensor was one."""
        whole = whole.view(self.slot.shape)
        return whole if self.dtensor is None else self.dtensor.to_dtensor(whole)


class RaggedShard(Shard):
    """The placement of a RaggedTensor along one mesh axis: each rank holds a run of the flattened elements.

    It is a Shard, because torch asks for this class before it cuts a tensor, but it equals no Shard(0): rows may be cut
    inside, and ranks hold unequal parts. Source: RaggedShard of veScale-FSDP (arXiv 2602.22437).
    """

    def __init__(self, spec: RaggedSpec, *, is_last: bool) -> None:
        """Describe the axis of `spec`'s mesh that is the last to cut, or another one."""
        super().__init__(0)
        self.spec, self.is_last = spec, is_last

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, int]:
        """The rows of which this rank holds at least a part, (number, first). The last axis cuts, the others do not."""
        if not self.is_last:
            return curr_local_size, 0
        rows = held_rows(self.spec)
        return len(rows), rows.start

    def __eq__(self, other: object) -> bool:
        if sys._getframe(1).f_code.co_name == "_verify_shard_order":  # of a DTensorSpec that is about to be made
            raise TypeError(
                "a DTensor of torch's own, as DTensor.from_local makes, cannot have the placements of a RaggedTensor, "
                "which is cut inside rows: make tensors like the parameter by torch.empty_like(p), or p.new_zeros("
                "p.shape), or compute on p.to_local()"
            )
        return isinstance(other, RaggedShard) and self.is_last == other.is_last and self.spec == other.spec

    def __hash__(self) -> int:
        return hash((RaggedShard, self.spec, self.is_last))

    def __repr__(self) -> str:
        return f"RaggedShard({self.spec.extent})"

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RaggedShard cannot be pickled, since it refers to process groups of this process")


def placements_of(spec: RaggedSpec, *, on_meta: bool = False) -> tuple[Placement, ...]:
    """The placements over the axes of the mesh: an island axis replicates, the others cut.

    They are Shard(0) for a tensor `on_meta`: [Note: RaggedTensors are DTensors].
    """
    num_axes = spec.cluster.mesh.ndim
    num_cutting = spec.cluster.num_cutting_axes
    cut = [
        Shard(0) if on_meta and spec.shape else RaggedShard(spec, is_last=axis == num_cutting - 1)
        for axis in range(num_cutting)
    ]
    return (*[Replicate()] * (num_axes - num_cutting), *cut)


def local_shape_on_meta(spec: RaggedSpec) -> tuple[int, ...]:
    """The shape of this rank's part by Shard(0); flat for a scalar, which Shard(0) cannot cut."""
    if not spec.shape:
        return (spec.extent.numel if spec.extent else 0,)
    placements = placements_of(spec, on_meta=True)
    return _compat.local_box(spec.shape, spec.cluster.mesh, placements)[0]


def held_rows(spec: RaggedSpec) -> range:
    """The indices of dim 0 of which this rank holds an element; all of them if another mesh axis cuts as well."""
    if not spec.shape or spec.dtensor is not None:
        return range(spec.shape[0] if spec.shape else 1)
    held, inner = spec.held, math.prod(spec.shape[1:])
    return range(held.start // inner, -(-held.stop // inner)) if held.numel else range(0)


class LocalPart(Tensor):
    """This rank's part of a RaggedTensor, flat: a plain tensor whose `copy_` also takes larger ones.

    It shares memory and version with the RaggedTensor. Results of operations are plain tensors, as of Parameters.
    """

    __torch_function__ = _compat.plain_results
    _cut: RaggedSpec

    @staticmethod
    def of(local: Tensor, spec: RaggedSpec) -> LocalPart:
        """Make `local`, the flat elements of `spec.extent`, able to copy from the whole tensor."""
        part = local.as_subclass(LocalPart)
        part._cut = spec
        return part

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy from a tensor of this part's shape, from the whole tensor, or from the rows of which this rank has some.

        Shapes: (n,), the global shape, or (len(held_rows), *shape[1:]).
        """
        if source.shape != self.shape:
            source = _part_of(source, self._cut)
        return super().copy_(source, non_blocking)


def _part_of(source: Tensor, spec: RaggedSpec) -> Tensor:
    """Select this rank's part of the whole tensor or of the rows that it has a part of; others stay as they are."""
    rows = held_rows(spec)
    if tuple(source.shape) == spec.shape:
        return spec.part_of(source)
    if spec.shape and tuple(source.shape) == (len(rows), *spec.shape[1:]):
        held, begin = spec.held, rows.start * math.prod(spec.shape[1:])
        return source.reshape(-1)[held.start - begin : held.stop - begin] if held.numel else source.reshape(-1)
    return source
