"""Parameters that convert themselves before the gather, such as torchao's float8 weights.

[Note: Conversion]
FSDP2 asks the tensor of a sharded parameter for two methods. `fsdp_pre_all_gather` returns the tensors to gather, such
as one in float8, and metadata, such as its scale. `fsdp_post_all_gather` makes the parameter that forward uses out of
the gathered tensors and the metadata. laconic calls both alike. It converts before the first level of a gather, so the
network, the node and the cache carry the converted elements. How they cross is in ragged/packing.py.

A rank holds a run of the parameter's elements. If these are whole rows, the first method gets them as rows, as under
FSDP2, else flat; `granularity=laconic.rows(1)` keeps rows whole for a method that needs them. A rank may hold more rows
than FSDP2's equal chunks have. A method that cannot convert so many, as it fills up to such chunks, is found by a trial
in `fully_shard`. So is one that means a number over ranks, such as torchao's BitNet: here ranks hold unequal parts, and
some none. Its parameter has a bucket of its own, which is cut into equal chunks.

A class may say which blocks a rank must hold whole, in the attribute `uncut_block` (a `laconic.Block`), such as tiles
that share a scale. That is then the parameter's granularity, and a coarser one may be asked for. If it has an attribute
`first_element`, that is set to the place of the rank's elements in the parameter before they are converted. A class
whose `converts_parts` is True may have been cut by another parallelism before, such as experts: what is left on a rank
converts as a parameter of its own, and forward sees a DTensor of it.

The elements that train stay in the bucket's shard, as for all parameters. A tensor of the parameter's class holds a
view of them, in the attribute that `__tensor_flatten__` names. Converting parameters have buckets of their own. If it
names several, as torch's TwoTensor does, all of them must be equal: they get one gradient and one update, and are kept
once. The gradient is then that of the first.

The methods may also be put on the tensor `_local_tensor` of a sharded parameter, before the first forward. They then
get that tensor, which is flat. Other parameters of the bucket cross as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from laconic.comm.cluster import Cluster
from laconic.layout.granularity import Block
from laconic.ragged.dtensor import DTensorShard
from laconic.ragged.packing import Converted, ShardPacking, agree_on_packing, chunk_shape


def converts(parameter: Tensor) -> bool:
    """True if a parameter converts itself before FSDP2's gather."""
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return hasattr(held, "fsdp_pre_all_gather")


def check_convertible(parameter: Tensor, name: str) -> None:
    """Refuse a parameter whose conversion laconic cannot run.

    Raises:
        NotImplementedError: a converting parameter is a DTensor, or does not wrap one tensor of its own shape.
    """
    if not converts(parameter):
        return
    held = holder_of(parameter)
    if isinstance(parameter, DTensor) and not getattr(held, "converts_parts", False):
        raise NotImplementedError(
            f"{name} converts itself before the gather (fsdp_pre_all_gather) and is cut by another parallelism as "
            "well; laconic does one or the other. Turn the conversion off (torchao: enable_fsdp_float8_all_gather="
            "False), or do not cut this parameter over another mesh axis"
        )
    names = _inner_names(held)
    inner = [getattr(held, each).detach() for each in names]
    is_alike = all((each.shape, each.dtype) == (held.shape, held.dtype) for each in inner)
    if not inner or not is_alike or not all(each.is_meta or torch.equal(each, inner[0]) for each in inner[1:]):
        raise NotImplementedError(
            f"{name} is a {type(held).__name__} with fsdp_pre_all_gather, and consists of {len(inner)} tensors "
            f"({', '.join(names) or 'no __tensor_flatten__'}); laconic converts parameters that wrap one tensor of "
            "their own shape and dtype, or several equal ones, which one gradient keeps equal. Give it in "
            "ignored_params"
        )


def uncut_numel(parameter: Tensor) -> int | None:
    """The elements of a block that a converting parameter wants whole: [Note: Conversion]. None if it does not say."""
    held = holder_of(parameter)
    block: Block | None = getattr(held, "uncut_block", None) if converts(parameter) else None
    return None if block is None else block.numel(held.shape)


def holder_of(parameter: Tensor) -> Tensor:
    """The tensor that converts: a parameter itself, or this rank's part of a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def held_elements(parameter: Tensor) -> Tensor:
    """The elements that this rank holds before `fully_shard`: its shard of a DTensor, or all of another parameter.

    Those of a converting parameter are the tensor that it wraps, or the first of several equal ones.
    """
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return (first_inner(held) if converts(parameter) else held).detach()


def first_inner(tensor: Tensor) -> Tensor:
    """The first tensor that a wrapping class holds; a tensor of another class itself."""
    names = () if isinstance(tensor, DTensor) else _inner_names(tensor)
    return getattr(tensor, names[0]) if names else tensor


def _inner_names(parameter: Tensor) -> Sequence[str]:
    flatten = getattr(parameter, "__tensor_flatten__", None)
    return () if flatten is None else flatten()[0]


def needs_equal_chunks(
    parameter: Tensor,
    module: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    *,
    block_numel: int,
) -> bool:
    """True if a conversion fails on more rows than FSDP2's chunks have, or minds empty ranks: [Note: Conversion].

    It gets no less than a block of `block_numel` elements, as ranks hold whole ones. Methods that take the mesh alone
    cannot know the chunks. Collective over `mesh` if the conversion is.
    """
    parameter = holder_of(parameter)
    chunk = chunk_shape(parameter.shape, mesh.size())
    if mesh.size() == 1 or not chunk:
        return False

    rows = math.ceil(block_numel / max(1, math.prod(chunk[1:])))

    def convert(part: Tensor) -> Any:
        rest = () if _takes_mesh_only(parameter) else (parameter.shape, parameter.stride(), module, precision)
        return _part_of_class(parameter, part).fsdp_pre_all_gather(mesh, *rest)  # type: ignore[attr-defined]

    def filled(num_blocks: int, value: float) -> Tensor:
        return torch.full((num_blocks * rows, *chunk[1:]), value, dtype=parameter.dtype, device=device)

    try:
        with torch.no_grad():
            if not hasattr(parameter, "uncut_block") and _minds_zeros(convert, filled, mesh.get_local_rank()):
                return True
            if chunk[0] < parameter.shape[0] and not _takes_mesh_only(parameter):
                convert(filled(chunk[0] // rows + 1, 0.0))
    except (RuntimeError, IndexError, ValueError, AssertionError):
        return True
    return False


def _minds_zeros(convert: Callable[[Tensor], Any], filled: Callable[[int, float], Tensor], rank: int) -> bool:
    """True if what a rank makes of its elements changes when other ranks have zeros alone, as a mean over ranks does.

    First ranks of even number have zeros, then the others; so each rank knows, without a message.
    """
    wanted = convert(filled(1, 1.0))
    found = [convert(filled(1, float(rank % 2 == turn))) for turn in range(2)][rank % 2]
    pairs = zip(tree_leaves(wanted), tree_leaves(found), strict=True)
    return not all(_are_equal(*pair) for pair in pairs if type(pair[0]) is Tensor)  # fake tensors have no values


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def is_patched(sharded: Tensor) -> bool:
    """True if the methods were put on the local tensor of a sharded parameter."""
    return hasattr(sharded._local_tensor, "fsdp_pre_all_gather")  # type: ignore[attr-defined]


def _takes_mesh_only(holder: Tensor) -> bool:
    return len(inspect.signature(holder.fsdp_pre_all_gather).parameters) == 1  # type: ignore[attr-defined]


def _part_of_class(prototype: Tensor, held: Tensor) -> Tensor:
    """Make a tensor of the class of `prototype` that holds `held`."""
    few = prototype.detach().reshape(-1)[:1]
    part = few.new_zeros(held.shape, dtype=held.dtype, device=held.device)
    _hold(part, held)
    return part


def _hold(part: Tensor, held: Tensor) -> None:
    for name in _inner_names(part):
        setattr(part, name, held)


class Conversion:
    """The conversion of one parameter: [Note: Conversion]."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        mesh: DeviceMesh,
        precision: MixedPrecisionPolicy,
        parameter: Tensor,
        *,
        block_numel: int = 1,
        first_element: int = 0,
        shard: DTensorShard | None = None,
    ) -> None:
        """Convert a parameter, whose owner is `module`, between the ranks of `mesh`, which has one axis.

        Its blocks have `block_numel` elements, and this rank's begin at `first_element`. The class of the parameter
        converts, or the local tensor of a sharded one does. If neither does, the elements cross in the dtype of
        forward. With `shard` another parallelism has cut the parameter, a DTensor, of which that is left.
        """
        self._name, self._module, self._mesh, self._precision = name, module, mesh, precision
        self._block_numel, self._first_element, self._shard = block_numel, first_element, shard
        if shard is not None:
            parameter = holder_of(parameter)
        self._shape, self._stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
        is_sharded = isinstance(parameter, DTensor)
        self._prototype = None if is_sharded else parameter.detach().reshape(-1)[:1].clone()
        self._patched = parameter if is_sharded and is_patched(parameter) else None
        self._part: Tensor | None = None  # of the parameter's class: holds a view of this rank's elements
        self._metadata: Any = None
        self._gathered: nn.Parameter | None = None
        self._buffers: list[tuple[torch.UntypedStorage, int]] = []  # that the gathered parameter needs besides

    @property
    def is_patched(self) -> bool:
        """True if the methods were put on the local tensor of the sharded parameter."""
        return self._patched is not None

    @torch.no_grad()
    def encode(self, local: Tensor, dtype: torch.dtype) -> Converted:
        """Convert this rank's elements, (n,), and keep the metadata for `decode`. Collective over the mesh, maybe.

        `dtype` is that of the parameter in forward.
        """
        holder = self._holder(local)
        if holder is None:
            tensors = [local.to(dtype)]
        else:
            rest = () if _takes_mesh_only(holder) else (self._shape, self._stride, self._module, self._precision)
            made, self._metadata = holder.fsdp_pre_all_gather(self._mesh, *rest)  # type: ignore[attr-defined]
            tensors = [each.to(local.device) for each in ([made] if isinstance(made, Tensor) else made)]
        return Converted(name=self._name, shape=tuple(self._shape), numel=local.numel(), tensors=tensors)

    def _holder(self, local: Tensor) -> Tensor | None:
        """The tensor whose methods convert; None if there are none."""
        if self._patched is not None:
            if not is_patched(self._patched):
                raise RuntimeError(
                    f"fsdp_pre_all_gather was put on the _local_tensor of {self._name}, whose memory has moved since, "
                    "as by model.to(...); put it on the new _local_tensor before the next forward"
                )
            self._part = self._patched._local_tensor  # type: ignore[attr-defined]
        elif self._prototype is not None:
            self._part = self._bind(local)
            if hasattr(self._part, "first_element"):
                self._part.first_element = self._first_element
        return self._part

    def _bind(self, local: Tensor) -> Tensor:
        """Make a tensor of the parameter's class hold `local`. An empty one holds a block of zeros, for reductions."""
        inner = tuple(self._shape[1:])
        row = math.prod(inner)
        numel = local.numel() or max(1, row, self._block_numel)
        held = local if local.numel() else local.new_zeros(numel)
        if inner and row and numel % row == 0:
            held = held.view(numel // row, *inner)
        part = self._part
        if part is None or (part.shape, part.dtype, part.device) != (held.shape, held.dtype, held.device):
            assert self._prototype is not None
            return _part_of_class(self._prototype, held)
        _hold(part, held)
        return part

    @torch.no_grad()
    def decode(self, gathered: tuple[Tensor, ...], dtype: torch.dtype) -> nn.Parameter:
        """Return the parameter for forward, the same object each time, from the converted tensors of all ranks.

        `gathered` are views that stay. `dtype` is that of the parameter in forward.

        Raises:
            NotImplementedError: fsdp_post_all_gather returns a tensor of another shape than the parameter's.
        """
        if self._prototype is None and self._patched is None:
            if self._gathered is None:
                self._gathered = nn.Parameter(gathered[0], requires_grad=gathered[0].is_floating_point())
            return self._gathered
        assert self._part is not None, "the elements of a parameter were decoded before any were encoded"
        gathered = tuple(map(holder_of, gathered))
        if self._gathered is not None:
            for storage, nbytes in self._buffers:
                storage.resize_(nbytes)
            out = self._gathered if self._shard is None else holder_of(self._gathered)
            self._part.fsdp_post_all_gather(gathered, self._metadata, dtype, out=out)  # type: ignore[attr-defined]
            return self._gathered
        decoded, inner = self._part.fsdp_post_all_gather(gathered, self._metadata, dtype)  # type: ignore[attr-defined]
        if decoded.shape != self._shape:
            raise NotImplementedError(
                f"fsdp_post_all_gather of {self._name} made a tensor of shape {tuple(decoded.shape)} out of "
                f"{[tuple(each.shape) for each in gathered]}; forward needs {tuple(self._shape)}. laconic cuts off "
                "what fsdp_pre_all_gather adds to fill up FSDP2's equal chunks, and nothing else. Give the "
                "parameter in ignored_params"
            )
        own = {each.untyped_storage().data_ptr() for each in gathered}
        storages = [each.untyped_storage() for each in inner]
        self._buffers = [(each, each.nbytes()) for each in storages if each.data_ptr() not in own]
        shown = decoded if self._shard is None else self._shard.to_dtensor(decoded)
        self._gathered = nn.Parameter(shown, requires_grad=decoded.is_floating_point())
        return self._gathered

    @property
    def nbytes(self) -> int:
        """The bytes that the decoded parameter takes besides the gathered elements."""
        return sum(nbytes for _, nbytes in self._buffers)

    def forget(self) -> None:
        """Forget the decoded parameter: the buffer that it was made from is gone."""
        self._gathered, self._buffers = None, []

    def free(self) -> None:
        """Free the memory that the decoded parameter takes besides the gathered elements."""
        for storage, _ in self._buffers:
            storage.resize_(0)


class Conversions:
    """The conversions of the parameters of one bucket, and the form in which they cross: [Note: Conversion]."""

    def __init__(self, cluster: Cluster, each: Sequence[Conversion]) -> None:
        """Convert between the ranks of `cluster`; `each` has one conversion for each parameter."""
        self._cluster, self.each = cluster, each
        self.packing: ShardPacking | None = None
        """The form in which they cross: once `agree` has run, until `forget`."""
        self._joined: list[Tensor] = []  # the gathered tensors, if they are packed

    def agree(self, elements: Sequence[Tensor], numels: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        """Find the form in which the ranks' `elements` of each parameter cross. Collective.

        `numels` has the elements of each parameter in each shard. `dtype` is that of the parameters in forward.
        """
        self.packing = agree_on_packing(self._cluster, self._encode(elements, dtype), numels)

    def write(self, own: Tensor, places: Sequence[Tensor], elements: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Convert this rank's `elements` of each parameter, and write them into its shard, `own`, as that crosses.

        `places` has the elements of each parameter in `own`, if shards cross as elements.
        """
        assert self.packing is not None, "weights are written before their form is agreed on"
        converted = self._encode(elements, dtype)
        if not self.packing.is_elements:
            self.packing.write(own, self._cluster.shard_index, converted)
            return
        for place, item in zip(places, converted, strict=True):
            place.copy_(item.tensors[0].reshape(-1)[: item.numel])

    def decode(self, full: Tensor, views: Sequence[Tensor], dtype: torch.dtype) -> list[nn.Parameter]:
        """Make the parameters for forward, the same objects each time, out of the gathered shards of all ranks.

        `views` has the elements of each parameter in `full`, if shards cross as elements.
        """
        assert self.packing is not None, "weights were decoded before any were encoded"
        if self.packing.is_elements:
            return [each.decode((view,), dtype) for each, view in zip(self.each, views, strict=True)]
        packed = self.packing.tensors
        if not self._joined:
            self._joined = [torch.empty(each.shape, dtype=each.dtype, device=full.device) for each in packed]
        for tensor in self._joined:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self.packing.join(full, [tensor.data for tensor in self._joined])  # `.data`: a refill is no edit
        made: list[list[Tensor]] = [[] for _ in self.each]
        for each, tensor in zip(packed, self._joined, strict=True):
            made[each.parameter].append(tensor)
        return [each.decode(tuple(own), dtype) for each, own in zip(self.each, made, strict=True)]

    def _encode(self, elements: Sequence[Tensor], dtype: torch.dtype) -> list[Converted]:
        return [each.encode(own, dtype) for each, own in zip(self.each, elements, strict=True)]

    @property
    def nbytes(self) -> int:
        """The bytes that the decoded parameters take besides the gathered elements."""
        return sum(tensor.nbytes for tensor in self._joined) + sum(each.nbytes for each in self.each)

    def free(self) -> None:
        """Free the memory that the decoded parameters take besides the gathered elements."""
        for each in self.each:
            each.free()
        for tensor in self._joined:
            tensor.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Forget the decoded parameters: the buffer that they were made from is gone."""
        self.packing, self._joined = None, []
        for each in self.each:
            each.forget()
