"""RaggedTensor: what `model.parameters()` shows between uses.

[Note: Kinds of tensor]
A parameter exists in two forms. *Sharded*: a `RaggedTensor` of the global shape whose local part is a view of this
rank's shard; the optimizer, checkpoints and the user see this one. *Gathered*: a plain `torch.nn.Parameter`, a view of
the full bucket, which a module's forward and backward use (shard/bucket.py). A RaggedTensor never takes part in
autograd: gradients arrive on it, ready-made.

[Note: Versions]
A gathered slice is valid as long as the shard it was made from has not changed. Every change bumps the shard's autograd
version counter: torch does it for in-place operations on views of the shard (`to_local()`), and `__torch_dispatch__`
does it for operations on the RaggedTensor itself, on every rank, also where the local part is empty, because all ranks
must agree on whether to gather. For the same reason a checkpoint load counts as a change when it asks which part to
fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator
from laconic.layout.bucket import BucketLayout, Extent, Slot
from laconic.ragged.dtensor import OuterShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from laconic.ragged.redistribute import Redistribution


@dataclass(frozen=True, kw_only=True, eq=False)
class RaggedSpec:
    """Where one tensor's elements live: a slot of a bucket's layout, cut over a cluster."""

    cluster: Cluster
    layout: BucketLayout
    index: int
    outer: OuterShard | None = None
    """What another parallelism holds here of the tensor, of which this is a part: [Note: Two parallelisms, two meshes]
    in ragged/dtensor.py."""

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, RaggedSpec)
            and self.cluster is other.cluster
            and self.index == other.index
            and self.outer == other.outer
            and self.layout == other.layout
        )

    def __hash__(self) -> int:
        return hash((id(self.cluster), self.index, self.layout))

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedSpec:
        return self  # a place, not a thing: asynchronous checkpoints copy tensors with their attributes

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.outer.shape if self.outer is not None else self.layout.slots[self.index].shape

    @property
    def extent(self) -> Extent | None:
        """This rank's elements."""
        return self.layout.extent(self.index, self.cluster.shard_index)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's flat part of a plain tensor of the global shape."""
        whole = self.outer.part_of(whole) if self.outer is not None else whole
        extent = self.extent or Extent(0, 0)
        return whole.reshape(-1)[extent.start : extent.stop]


class RaggedTensor(torch.Tensor):
    """A tensor of which each rank holds one run of whole blocks, possibly none.

    `.shape` is the global shape. Element-wise operations, foreach and fused ones included, run on the local part; norms
    reduce over the mesh; in-place random fills draw the global tensor and keep this rank's part, so that equal seeds
    give the unsharded values; `copy_` also takes a plain tensor of the global shape. Anything else raises.
    """

    _local: Tensor
    _spec: RaggedSpec
    _bump: Callable[[], None] | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spec: RaggedSpec,
        *,
        device: torch.device | None = None,
        bump: Callable[[], None] | None = None,
    ) -> RaggedTensor:
        """Wrap `local`, the flat elements of `spec.extent`.

        Args:
            device: where the tensor claims to be, if not where `local` rests (a frozen shard may rest in host memory).
            bump: called after every change made through this tensor; parameters bump their shard's version.
        """
        self = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=local.dtype, device=device or local.device)
        self._local, self._spec, self._bump = local, spec, bump
        return self

    @property
    def extent(self) -> Extent | None:
        """This rank's run of the flattened global elements; None if it holds nothing."""
        return self._spec.extent

    @property
    def spec(self) -> RaggedSpec:
        """The tensor's place in its layout."""
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh the tensor is cut over."""
        return self._spec.cluster.mesh

    def to_local(self) -> Tensor:
        """This rank's part, flat, a view: changing it in place changes the tensor (do so on every rank)."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank, gathered over the mesh. Collective.

        Cost: as one gather of shards as long as the longest extent; counted as "control".
        """
        spec, layout = self._spec, self._spec.layout
        lengths = [
            extent.numel if (extent := layout.extent(spec.index, shard)) else 0 for shard in range(layout.num_shards)
        ]
        longest = max(lengths)
        piece = torch.zeros(longest, dtype=self.dtype, device=self.device)
        piece[: self._local.numel()] = self._local
        for name in ("node", "local"):  # [Note: A bucket's order]: shards come out in order
            level = Communicator(spec.cluster, name)
            whole = piece.new_empty(piece.numel() * level.size)
            if pending := level.all_gather(whole, piece, "control"):
                pending.wait()
            piece = whole
        rows = piece.view(layout.num_shards, longest)
        slot = layout.slots[spec.index]
        whole = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]).view(slot.shape)
        return whole if spec.outer is None else spec.outer.wrap(whole).full_tensor()

    def redistribute(
        self, target: RaggedSpec | None, *, async_op: bool = False
    ) -> RaggedTensor | Tensor | Redistribution:
        """This tensor cut as `target` says, or whole on every rank for None. Collective; see `shard.redistribute`.

        With `async_op` a `Redistribution`, whose `wait()` gives a list of one.
        """
        from laconic.ragged.redistribute import redistribute  # it makes tensors of this class

        under_way = redistribute([self], [target])
        return under_way if async_op else under_way.wait()[0]

    def like(self, local: Tensor) -> RaggedTensor:
        """Another tensor with this one's layout."""
        return RaggedTensor(
            local, self._spec, device=local.device if local.device != self._local.device else self.device
        )

    def rows(self, start: int, stop: int, *, keep_dim: bool) -> RaggedTensor:
        """A view of rows [start, stop) of dim 0: the same borders between ranks, a shorter tensor; edits count as this
        one's."""
        if self._spec.outer is not None:
            raise NotImplementedError(
                "rows of a tensor that another mesh axis cuts as well; gather it with .full_tensor()"
            )
        slot = self._spec.layout.slots[self._spec.index]
        inner = math.prod(slot.shape[1:])
        shape = (stop - start, *slot.shape[1:]) if keep_dim else slot.shape[1:]
        rows = Slot(name=slot.name, shape=shape, block=slot.block, offset=slot.offset + start * inner)
        spec = RaggedSpec(cluster=self._spec.cluster, layout=replace(self._spec.layout, slots=(rows,)), index=0)
        whole, part = self.extent or Extent(0, 0), spec.extent or Extent(0, 0)
        begin = part.start + start * inner - whole.start if part.numel else 0
        return RaggedTensor(self._local[begin : begin + part.numel], spec, device=self.device, bump=self._bump)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        # A tensor of its own, cut alike: not one with a process group of its own.
        copied = RaggedTensor(self._local.clone(), self._spec, device=self.device)
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True  # what torch calls a Parameter
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"extent={self.extent}, local={self._local})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a RaggedTensor cannot be pickled, since each rank holds only a part; save it with "
            "torch.distributed.checkpoint, or gather it with .full_tensor() first"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # `kwargs` may be None, whatever the stub says
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from laconic.ragged.operations import dispatch  # it wraps results in this class

        return dispatch(func, args, kwargs or {})

    # -- the protocol of torch.distributed.checkpoint (DCP) ------------------------------------------------------------

    def _checkpoint_chunks(self) -> list[Any]:
        """This rank's boxes in the global tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        from laconic.layout.bucket import boxes

        slot, outer = self._spec.layout.slots[self._spec.index], self._spec.outer
        origin = outer.offset if outer is not None else (0,) * self.dim()

        if self.numel() == 0 and self._spec.cluster.shard_index == 0:  # somebody must say that there is nothing
            return [ChunkStorageMetadata(offsets=torch.Size([0] * self.dim()), sizes=self.shape)]
        extent = self.extent or Extent(0, 0)
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(a + b for a, b in zip(origin, offsets, strict=True)), sizes=torch.Size(sizes)
            )
            for offsets, sizes in boxes(slot.shape, extent)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        if self._bump is not None:  # [Note: Versions]: DCP asks this before it fills the parts in place
            self._bump()
        return self._checkpoint_chunks()

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self._local), size=self.size()
                ),
            )
            for chunk in self._checkpoint_chunks()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        if self.numel() == 0:
            return self._local.view(self.shape)
        extent = self.extent
        assert extent is not None, f"{index} asks for a part of a tensor of which this rank holds nothing"
        begin = extent.start
        for chunk in self._checkpoint_chunks():
            numel = math.prod(chunk.sizes)
            if index.offset is None or tuple(index.offset) == tuple(chunk.offsets):
                return self._local[begin - extent.start : begin - extent.start + numel].view(chunk.sizes)
            begin += numel
        raise ValueError(f"{index} is not a part this rank holds; it holds {self._checkpoint_chunks()}")


_compat.let_optimizers_batch(RaggedTensor)
