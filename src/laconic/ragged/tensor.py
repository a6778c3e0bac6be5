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

[Note: Edits wait for reads]
A device reads weights that rest in host memory behind the host's back, and no stream orders the host's edits after
that. To wait at the end of each forward would let the device run dry before backward. So a forward leaves its wait here
(`delay_edits`), and the next edit of any RaggedTensor makes it: an in-place operation, a request for the local part or
the boxes, a step of an optimizer. In most steps backward comes before, and its end takes the wait away. Only a local
part that was taken before the forward can be edited too soon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import add
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from laconic import _compat
from laconic.layout.bucket import BucketLayout, Extent, boxes
from laconic.ragged.dispatch import HISTOGRAM, handlers
from laconic.ragged.dtensor import is_torch_dtensor, whole_of
from laconic.ragged.parts import Box, BoxedTensor
from laconic.ragged.redistribute import gather_whole
from laconic.ragged.spec import LocalPart, RaggedSpec, local_shape_on_meta, placements_of

_waits: list[Callable[[], None]] = []


def delay_edits(wait: Callable[[], None]) -> None:
    """Let the next edit call `wait` first: [Note: Edits wait for reads]."""
    _waits.append(wait)


def withdraw(wait: Callable[[], None]) -> None:
    """Take back what `delay_edits` got, if no edit has called it yet."""
    if wait in _waits:
        _waits.remove(wait)


def admit_edits() -> None:
    """Make the waits that edits need: one is about to come."""
    while _waits:
        _waits.pop()()


class NoViewError(NotImplementedError, AttributeError):
    """A RaggedTensor has no such view. It is an AttributeError, too, so that `hasattr` says no."""


class RaggedTensor(BoxedTensor, _compat.SelfDispatchedDTensor):
    """A tensor of which each rank holds one run of whole blocks, possibly none.

    `.shape` is the global shape. Element-wise operations, foreach and fused ones included, run on the local part. Sums,
    means, variances, extrema, norms, `any`, `all`, `equal` and `allclose` reduce over the mesh, to plain results.
    In-place random fills draw the global tensor and keep this rank's part, so equal seeds give the unsharded values.
    `copy_` also takes a plain tensor of the global shape. Rows, by `w[2:5]`, `split`, `chunk` or `unbind`, are views.
    Elements by index or mask are read and written on the rank that holds them. Every other operation raises
    NotImplementedError, whose text names the remedy. The handlers are in operations.py, indexing.py and reductions.py
    of this room.

    Source: RaggedShard of veScale-FSDP (arXiv 2602.22437).
    """

    spec: RaggedSpec
    """The layout of the tensor."""
    _local_tensor: Tensor
    _bump: Callable[[], None] | None
    _zeroings: list[int]
    """One number, which the aliases of a tensor share."""

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
        if isinstance(local, LocalPart):
            local = local.as_subclass(Tensor)
        if torch.is_inference_mode_enabled():  # an alias made there would have no version, and torch raises
            with torch.inference_mode(False):
                return cls(local, spec, device=device, bump=bump)
        self = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=local.dtype, device=device or local.device)
        self._local_tensor, self.spec, self._bump, self._zeroings = local, spec, bump, [0]
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` makes the tensor, and DTensor's own `__init__` costs time."""

    @property
    def extent(self) -> Extent | None:
        """This rank's run of the flattened elements; None if it holds nothing."""
        return self.spec.extent

    @property
    def data(self) -> Tensor:
        """The same memory, as `detach()` returns it. A plain tensor of the global shape may be assigned: it is copied.

        Raises:
            TypeError: the assigned tensor has another dtype.
        """
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:  # torch's own setter would replace the memory of this wrapper only
        if value.dtype != self.dtype:
            raise TypeError(
                f"param.data = value: the parameter is sharded and of {self.dtype}, the value of {value.dtype}; "
                "convert the model, with model.to(dtype), or the value"
            )
        with torch.no_grad():
            self.copy_(value)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the tensor is cut."""
        return self.spec.cluster.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """RaggedShard for each axis that cuts: [Note: RaggedTensors are DTensors] in ragged/spec.py."""
        return placements_of(self.spec, on_meta=self._local_tensor.is_meta)

    @property
    def _spec(self) -> NoReturn:  # type: ignore[override]
        raise AttributeError(  # so that `hasattr` says no
            "a RaggedTensor has no DTensorSpec, since ranks hold runs of elements and not chunks of rows. Use "
            ".full_tensor(), .to_local() or torch.distributed.checkpoint. torch's own fully_shard cannot shard the "
            "parameters of laconic.fully_shard again"
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's part, flat: a view. An in-place change of it on any rank must happen on every rank.

        Its `copy_` also takes a plain tensor of the global shape. On the meta device it has the shape of Shard(0):
        [Note: RaggedTensors are DTensors] in ragged/spec.py. `grad_placements` are ignored, as there is no
        autograd.
        """
        if self._local_tensor.is_meta:
            return self._local_tensor.new_empty(local_shape_on_meta(self.spec))
        admit_edits()
        return LocalPart.of(self._local_tensor, self.spec)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Gather the whole tensor on every rank. Collective. `grad_placements` are ignored, as there is no autograd.

        Cost: see `gather_whole`. The outer axes of a DTensor then gather what they cut, one by one.
        """
        whole = self.spec.assemble(gather_whole(self.spec, self._local_tensor).to(self.device))
        return whole_of(whole) if is_torch_dtensor(whole) else whole

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Make a DTensor of torch's own with `placements`, from the whole tensor. Collective, on the same mesh.

        Arguments are those of `DTensor.redistribute`; the result is complete even with `async_op`, and has no autograd.
        Cost: see `gather_whole`.

        Raises:
            ValueError: `placements` are missing, or `device_mesh` is another mesh.
        """
        if placements is None or device_mesh not in (None, self.device_mesh):
            raise ValueError(
                f"redistribute of a RaggedTensor needs placements on its own mesh, got {placements} on {device_mesh}; "
                "gather the tensor with .full_tensor() and distribute it anew"
            )
        tensor = self if forward_dtype is None else cast(RaggedTensor, self.to(forward_dtype))
        if tuple(placements) == self.placements:
            return tensor
        everywhere = [Replicate()] * self.device_mesh.ndim
        whole = DTensor.from_local(tensor.full_tensor(), self.device_mesh, everywhere, run_check=False)
        return whole if list(placements) == everywhere else whole.redistribute(placements=placements)

    def alias(self) -> RaggedTensor:
        """Wrap the same memory again, as `p.detach()` does. A change of the result is a change of this tensor."""
        same = RaggedTensor(self._local_tensor, self.spec, device=self.device, bump=self._bump)
        same._zeroings = self._zeroings
        return same

    def move_to(self, local: Tensor) -> None:
        """Hold `local`, which has equal elements and lies on the same device, instead of the present part."""
        self._local_tensor = local

    def like(self, local: Tensor) -> RaggedTensor:
        """Wrap `local` as this rank's part of another tensor with this tensor's layout."""
        device = local.device if local.device != self._local_tensor.device else self.device
        return RaggedTensor.__new__(RaggedTensor, local, self.spec, device=device)  # its `__init__` does nothing

    def rows(self, start: int, stop: int, *, keep_dim: bool) -> RaggedTensor:
        """Select rows [start, stop) of dim 0: a view. A change of the rows is a change of this tensor.

        Without `keep_dim`, there must be one row, and the result lacks dim 0.

        Raises:
            NotImplementedError: the tensor is a DTensor over another mesh axis, or its layout is no bucket's.
        """
        spec, layout = self.spec, self.spec.layout
        if spec.dtensor is not None or not isinstance(layout, BucketLayout):
            raise NotImplementedError(
                "a tensor that another mesh axis cuts as well, that has entries per block of another tensor, or that "
                "an index has selected, has no rows here; gather it with .full_tensor()"
            )
        rows = layout.rows(spec.index, start, stop, keep_dim=keep_dim)
        row_spec = RaggedSpec(cluster=spec.cluster, layout=rows, index=0)
        held, chosen = spec.held, row_spec.held
        begin = chosen.start + start * math.prod(spec.shape[1:]) - held.start if chosen.numel else 0
        local = self._local_tensor[begin : begin + chosen.numel]
        return RaggedTensor(local, row_spec, device=self.device, bump=self._bump)

    def without_outer_axes(self) -> RaggedTensor:
        """View this rank's shard of a DTensor, of the shard's shape; the same tensor if no other mesh axis cuts it."""
        if self.spec.dtensor is None:
            return self
        spec = replace(self.spec, dtensor=None)
        return RaggedTensor(self._local_tensor, spec, device=self.device, bump=self._bump)

    def note_change(self) -> None:
        """Count a change of the elements, on every rank: [Note: Versions]."""
        if self._bump is not None:
            self._bump()

    @property
    def zeroings(self) -> int:
        """How often the tensor has been set to zero, as by `zero_()`: alike on all ranks that run the same program."""
        return self._zeroings[0]

    def note_zeroing(self) -> None:
        """Count that the tensor has been set to zero."""
        self._zeroings[0] += 1

    def held_boxes(self) -> list[Box]:
        """See `BoxedTensor.held_boxes`."""
        admit_edits()
        spec = self.spec
        if self.numel() == 0:
            return [((0,) * self.dim(), self._local_tensor.view(self.shape))] if spec.cluster.shard_index == 0 else []
        origin = (0,) * self.dim() if spec.dtensor is None else spec.dtensor.offset
        held, begin = [], 0
        for offset, sizes in boxes(spec.slot.shape, spec.held):
            end = begin + math.prod(sizes)
            held.append((tuple(map(add, origin, offset)), self._local_tensor[begin:end].view(sizes)))
            begin = end
        return held

    def __tensor_flatten__(self) -> tuple[list[str], tuple[RaggedSpec, bool]]:
        """Give torch the inner tensor.

        Raises:
            NotImplementedError: torch.compile traces code that uses the tensor.
        """
        if _compat.is_dynamo_tracing():
            raise NotImplementedError(
                "torch.compile cannot trace a RaggedTensor, of which this rank holds only a part. Call the optimizer's "
                "step, and other code on sharded parameters, uncompiled; compile the model, or each block before "
                "fully_shard"
            )
        return ["_local_tensor"], (self.spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], flatten_spec: tuple[RaggedSpec, bool], outer_size: Any, outer_stride: Any
    ) -> RaggedTensor:
        spec, requires_grad = flatten_spec
        return RaggedTensor(inner_tensors["_local_tensor"], spec).requires_grad_(requires_grad)  # type: ignore[return-value]

    def __copy__(self) -> RaggedTensor:
        copied = self.alias().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        return cast(RaggedTensor, copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        copied = RaggedTensor(self._local_tensor.clone(), self.spec, device=self.device)  # with the same process groups
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True  # isinstance(copied, Parameter) asks for this attribute
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"extent={self.extent}, local={self._local_tensor})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a RaggedTensor cannot be pickled, so torch.save cannot save it either, since each rank holds only a part. "
            "Save models and optimizers with laconic.checkpoint.save_checkpoint or torch.distributed.checkpoint, "
            "weights alone with laconic.save_safetensors, or gather tensors with .full_tensor() on all ranks first"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # `kwargs` may be None, whatever the stub says
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _waits and func._schema.is_mutable:
            admit_edits()
        return handlers[func](func, args, kwargs or {})


_REFUSED = {
    "register_hook": "a hook of Tensor.register_hook on a sharded parameter would never run, since its gradient comes "
    "from a reduction. Use register_post_accumulate_grad_hook: it runs when the sum is in .grad",
    "numpy": f"a RaggedTensor is no NumPy array: this rank holds only a part. {HISTOGRAM}",
    "tolist": "a RaggedTensor is no list: this rank holds only a part. Use .full_tensor().tolist() on every rank, or "
    ".to_local().tolist()",
    "share_memory_": "a RaggedTensor has no memory of its own that processes could share: use .to_local()."
    "share_memory_(), or share_memory() of the sharded module",
}
"""Methods of tensors that cannot work on a part, and what their error says."""


def _refuse_method(name: str) -> None:
    def method(self: RaggedTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_REFUSED[name])

    setattr(RaggedTensor, name, method)


def _refuse_view(name: str) -> None:
    def view(self: RaggedTensor) -> Any:
        try:
            return getattr(Tensor, name).__get__(self)
        except NotImplementedError as error:
            raise NoViewError(str(error)) from None

    setattr(RaggedTensor, name, property(view, doc="Refuse: the elements of a row may lie on several ranks."))


for _name in _REFUSED:
    _refuse_method(_name)
for _name in ("T", "H", "mT", "mH"):
    _refuse_view(_name)

_compat.let_optimizers_batch(RaggedTensor)
