"""RaggedTensor: the tensors that `model.parameters()` shows between uses.

[Note: Kinds of tensor]
A parameter has two forms. *Sharded*: a RaggedTensor of the global shape, whose local part is a view of this rank's
shard. Optimizers, checkpoints and users see this form. *Gathered*: a plain `torch.nn.Parameter`, which is a view of the
full bucket. Forward and backward of a module use this form (shard/bucket.py). A RaggedTensor never takes part in
autograd: the engine sets its gradient.

[Note: Versions]
A node shard is valid as long as the shard that it was gathered from has not changed. Every change bumps the autograd
version counter of the shard. torch bumps it for in-place operations on views of the shard (`to_local()`). laconic bumps
it for operations on the RaggedTensor itself. It does so on every rank, even if the local part is empty, because all
ranks must agree whether to gather again. DCP's request for the boxes of a tensor counts as a change, too, because a
checkpoint load fills the boxes in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic import _compat
from laconic.comm.collectives import Communicator
from laconic.comm.traffic import Purpose
from laconic.layout.bucket import BucketLayout, Extent, Slot, boxes
from laconic.ragged.boxed import Box, BoxedTensor
from laconic.ragged.redistribute import Redistribution, TransferPlan
from laconic.ragged.spec import RaggedSpec

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function of (aten function, positional arguments, keyword arguments)."""
OTHERS = "others"
"""Stands for all aten functions that have no handler."""
_handlers: dict[Any, Handler] = {}


def implements(*functions: Any) -> Callable[[Handler], Handler]:
    """Make the decorated handler run aten functions that get a RaggedTensor, as in torchao's tensor subclasses.

    Give overloads (`aten.norm.Scalar`), packets (`aten.clone`, which stands for all its overloads), or `OTHERS`.
    """

    def register(handler: Handler) -> Handler:
        _handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register


class RaggedTensor(BoxedTensor):
    """A tensor of which each rank holds one run of whole blocks, possibly none.

    `.shape` is the global shape. Element-wise operations, foreach and fused ones included, run on the local part. Norms
    reduce over the mesh. In-place random fills draw the global tensor and keep this rank's part, so equal seeds give
    the unsharded values. `copy_` also takes a plain tensor of the global shape. Every other operation raises
    NotImplementedError. ragged/operations.py and ragged/norms.py hold the handlers.

    Source: RaggedShard of veScale-FSDP (arXiv 2602.22437).
    """

    _local: Tensor
    _spec: RaggedSpec
    _bump: Callable[[], None] | None

    def __new__(
        cls,
        local: Tensor,
        spec: RaggedSpec,
        *,
        device: torch.device | None = None,
        bump: Callable[[], None] | None = None,
    ) -> RaggedTensor:
        """Wrap `local`, the flat elements of `spec.extent`.

        The tensor shares the memory of `local`. It reports `device`, if that is not the device of `local`: a frozen
        shard may rest in host memory. `bump` is called after every change through this tensor; parameters bump the
        version of their shard.
        """
        self = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=local.dtype, device=device or local.device)
        self._local, self._spec, self._bump = local, spec, bump
        return self

    @property
    def extent(self) -> Extent | None:
        """This rank's run of the flattened elements; None if it holds nothing."""
        return self._spec.extent

    @property
    def spec(self) -> RaggedSpec:
        """The layout of the tensor."""
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the tensor is cut."""
        return self._spec.cluster.mesh

    def to_local(self) -> Tensor:
        """Return this rank's flat part, a view. If one rank changes its part in place, every rank must."""
        return self._local

    def full_tensor(self) -> Tensor:
        """Gather the whole tensor on every rank. Collective.

        Cost: the gather of one shard per rank, each as long as the longest extent; counted as "control".
        """
        spec, layout = self._spec, self._spec.layout
        extents = [layout.extent(spec.index, shard) or Extent(0, 0) for shard in range(layout.num_shards)]
        longest = max(extent.numel for extent in extents)
        gathered = torch.zeros(longest, dtype=self.dtype, device=self.device)
        gathered[: self._local.numel()] = self._local
        for level in ("node", "local"):  # [Note: A bucket's order]: shards come out in order
            communicator = Communicator(spec.cluster, level)
            piece, gathered = gathered, gathered.new_empty(gathered.numel() * communicator.size)
            if pending := communicator.all_gather(gathered, piece, "control"):
                pending.wait()
        rows = gathered.view(layout.num_shards, longest)
        whole = spec.assemble(torch.cat([row[: extent.numel] for row, extent in zip(rows, extents, strict=True)]))
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def redistribute(self, target: RaggedSpec | None, *, async_op: bool = False) -> Tensor | Redistribution:
        """Cut this tensor as `target` says; None asks for the whole on every rank. Collective; see `redistribute`.

        With `async_op`, return a `Redistribution`, whose `wait()` returns a list of one tensor.
        """
        redistribution = redistribute([self], [target])
        return redistribution if async_op else redistribution.wait()[0]

    def alias(self) -> RaggedTensor:
        """Wrap the same memory again, as `p.detach()` does. A change of the result is a change of this tensor."""
        return RaggedTensor(self._local, self._spec, device=self.device, bump=self._bump)

    def move_to(self, local: Tensor) -> None:
        """Hold `local`, which has equal elements and lies on the same device, instead of the present part."""
        self._local = local

    def like(self, local: Tensor) -> RaggedTensor:
        """Wrap `local` as this rank's part of another tensor with this tensor's layout."""
        device = local.device if local.device != self._local.device else self.device
        return RaggedTensor(local, self._spec, device=device)

    def rows(self, start: int, stop: int, *, keep_dim: bool) -> RaggedTensor:
        """Select rows [start, stop) of dim 0: a view. A change of the rows is a change of this tensor.

        Without `keep_dim`, there must be one row, and the result lacks dim 0.

        Raises:
            NotImplementedError: the tensor is a DTensor over another mesh axis, or has a `DerivedLayout`.
        """
        spec, slot, layout = self._spec, self._spec.slot, self._spec.layout
        if spec.dtensor is not None or not isinstance(layout, BucketLayout):
            raise NotImplementedError(
                "a tensor that another mesh axis cuts as well, or that has entries per block of another tensor, has no "
                "rows here; gather it with .full_tensor()"
            )
        inner = math.prod(slot.shape[1:])
        shape = (stop - start, *slot.shape[1:]) if keep_dim else slot.shape[1:]
        rows = Slot(name=slot.name, shape=shape, block=slot.block, offset=slot.offset + start * inner)
        row_spec = RaggedSpec(cluster=spec.cluster, layout=replace(layout, slots=(rows,)), index=0)
        held, chosen = self.extent or Extent(0, 0), row_spec.extent or Extent(0, 0)
        begin = chosen.start + start * inner - held.start if chosen.numel else 0
        return RaggedTensor(self._local[begin : begin + chosen.numel], row_spec, device=self.device, bump=self._bump)

    def note_change(self) -> None:
        """Count a change of the elements, on every rank: [Note: Versions]."""
        if self._bump is not None:
            self._bump()

    def held_boxes(self) -> list[Box]:
        """See `BoxedTensor.held_boxes`."""
        spec = self._spec
        if self.numel() == 0:
            return [((0,) * self.dim(), self._local.view(self.shape))] if spec.cluster.shard_index == 0 else []
        origin = (0,) * self.dim() if spec.dtensor is None else spec.dtensor.offset
        held, begin = [], 0
        for offset, sizes in boxes(spec.slot.shape, self.extent or Extent(0, 0)):
            end = begin + math.prod(sizes)
            held.append((tuple(map(add, origin, offset)), self._local[begin:end].view(sizes)))
            begin = end
        return held

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        copied = RaggedTensor(self._local.clone(), self._spec, device=self.device)  # with the same process groups
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True  # isinstance(copied, Parameter) asks for this attribute
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
        handler = _handlers.get(func) or _handlers.get(func.overloadpacket) or _handlers[OTHERS]
        return handler(func, args, kwargs or {})


def redistribute(
    tensors: Sequence[RaggedTensor], targets: Sequence[RaggedSpec | None], purpose: Purpose = "optimizer"
) -> Redistribution:
    """Begin to cut `tensors` as `targets` say. Collective over the island, with the same arguments on every rank.

    The tensors lie over one cluster and have any dtypes. `Redistribution.wait` returns RaggedTensors, and for None
    targets the whole tensors on every rank (DTensors, if the tensors were cut as DTensors before `fully_shard`). The
    tensors must not change until `wait` returns. A tensor whose part on this rank stays the same shares its memory with
    the result. The traffic is counted under `purpose`. Cost: see `TransferPlan.start`.

    Raises:
        ValueError: a target has another shape or another cluster than its tensor.
    """
    plan = TransferPlan([tensor.spec for tensor in tensors], targets, purpose)
    return plan.start([tensor.to_local() for tensor in tensors], partial(_in_new_cut, tensors, targets))


def _in_new_cut(
    tensors: Sequence[RaggedTensor], targets: Sequence[RaggedSpec | None], index: int, part: Tensor
) -> Tensor:
    tensor, target = tensors[index], targets[index]
    if target is None:
        return tensor.spec.assemble(part)
    return tensor if target == tensor.spec else RaggedTensor(part, target)


_compat.let_optimizers_batch(RaggedTensor)
