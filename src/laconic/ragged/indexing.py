"""Parts of a RaggedTensor that Python's brackets name: rows, runs of rows, and elements by index or mask.

[Note: Indexing]
No part of the tensor crosses the wire. Rows are views. Elements that an index or a mask names are read into another
RaggedTensor, which each rank holds the part of that it held before; so `w[mask] = -w[mask]` is local, `w[mask].sum()`
counts all elements, and `w[mask].to_local()` has this rank's. A write changes the elements that this rank holds. An
index or mask that is a plain tensor is the same on every rank, so that even one rank may read alone. Of a mask that is
a RaggedTensor, such as `w > 0`, a rank knows its part only: to read by it, the ranks exchange a number each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.comm.collectives import all_reduce
from laconic.layout.bucket import Extent, SelectedLayout
from laconic.ragged.dtensor import is_torch_dtensor, whole_of
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor, implements, remedy_for

aten = torch.ops.aten


def _refuse_other_dims(func: Any, source: RaggedTensor, dim: int) -> None:
    if source.dim() == 0 or dim % source.dim() != 0:
        raise NotImplementedError(
            f"{func} on dim {dim}: only whole rows of a RaggedTensor can be taken (dim 0). {remedy_for(func)}"
        )


@implements(aten.select.int, asks_torch=True)
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    source, dim, index = args
    _refuse_other_dims(func, source, dim)
    index %= source.shape[0]
    return source.rows(index, index + 1, keep_dim=False)


@implements(aten.slice.Tensor, asks_torch=True)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    source, dim, start, stop, step = args + (None, 0, None, None, 1)[len(args) :]  # torch leaves out trailing defaults
    _refuse_other_dims(func, source, dim)
    if step != 1:
        raise NotImplementedError(f"rows of a RaggedTensor (dim 0) can be sliced with step 1 only, not {step}")
    first, end, _ = slice(start, stop).indices(source.shape[0])
    return source.rows(first, max(first, end), keep_dim=True)


@implements(
    aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unbind, asks_torch=True
)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RaggedTensor]:
    source = args[0]
    dim = kwargs.get("dim", args[-1] if len(args) == len(func._schema.arguments) else 0)
    _refuse_other_dims(func, source, dim)
    pieces = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs)
    keep_dim = func.overloadpacket is not aten.unbind
    parts, start = [], 0
    for piece in pieces:
        stop = start + (piece.shape[0] if keep_dim else 1)
        parts.append(source.rows(start, stop, keep_dim=keep_dim))
        start = stop
    return parts


@implements(aten.index.Tensor, aten.masked_select, aten.index_select, asks_torch=True)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    source: RaggedTensor = _plain_operands_only(func, args[0])
    if func.overloadpacket is aten.index_select:
        _refuse_other_dims(func, source, args[1])
        chosen = _Selection.of(source, [_rows_of(source, args[2])])
    elif func.overloadpacket is aten.masked_select:
        chosen = _Selection.of(source, [_mask_of(func, source, args[1])])
    else:
        chosen = _Selection.of(source, args[1])
    layout = chosen.layout(source)
    spec = RaggedSpec(cluster=source.spec.cluster, layout=layout, index=0)
    return RaggedTensor(source._local_tensor[chosen.local], spec, device=source.device)


@implements(aten.index_put_, aten._index_put_impl_, aten.index_fill_, asks_torch=True)
def _index_put_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    target: RaggedTensor = _plain_operands_only(func, args[0])
    accumulates = False
    if func.overloadpacket is aten.index_fill_:
        _refuse_other_dims(func, target, args[1])
        chosen, values = _Selection.of(target, [_rows_of(target, args[2])]), args[3]
    else:
        chosen, values = _Selection.of(target, args[1]), args[2]
        accumulates = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    local = target._local_tensor
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=target.dtype, device=local.device)
    local.index_put_((chosen.local,), chosen.own_values(target, values).to(local.device), accumulates)
    target.note_change()
    return target


def _rows_of(tensor: RaggedTensor, index: Any) -> Any:
    """The rows that an index names. Raises: IndexError, of torch: there is no such row."""
    index = _plain(index)
    return torch.arange(tensor.shape[0], device=index.device).index_select(0, index)


def _mask_of(func: Any, tensor: RaggedTensor, mask: Any) -> Any:
    """A mask in the shape of the tensor. Raises: RuntimeError, of torch: it has no booleans."""
    torch.empty(0).masked_select(torch.empty(0, dtype=mask.dtype))
    if isinstance(mask, RaggedTensor):
        return mask
    if tuple(torch.broadcast_shapes(mask.shape, tensor.shape)) != tuple(tensor.shape):
        raise NotImplementedError(
            f"{func}: a mask of shape {tuple(mask.shape)} would repeat a RaggedTensor of shape {tuple(tensor.shape)}; "
            "gather it with .full_tensor()"
        )
    return whole_of(mask).expand(tensor.shape) if is_torch_dtensor(mask) else mask.expand(tensor.shape)


def _plain_operands_only(func: Any, operand: Any) -> RaggedTensor:
    if not isinstance(operand, RaggedTensor):
        raise NotImplementedError(
            f"{func} of a plain tensor takes no RaggedTensor, of which this rank holds only a part; give it "
            ".full_tensor(), or cut the plain tensor alike with torch.empty_like(ragged).copy_(plain)"
        )
    if operand.spec.dtensor is not None:
        raise NotImplementedError(
            f"{func}: a tensor that another mesh axis cuts as well has no elements by index here; gather it with "
            ".full_tensor()"
        )
    return operand


@dataclass(kw_only=True)
class _Selection:
    """The elements of a RaggedTensor that an index or a mask names: [Note: Indexing]."""

    local: Tensor
    """Those that this rank holds, as places in its part, in the order of the index."""
    places: Tensor | None
    """Those of all ranks, as flat places in the tensor, in the shape of the result; None for a RaggedTensor's mask."""
    mine: Tensor | None
    """Which of `places` this rank holds, in their shape."""

    @staticmethod
    def of(tensor: RaggedTensor, indices: Sequence[Any]) -> _Selection:
        """The selection of `tensor[indices]`.

        Raises:
            NotImplementedError: an index is a RaggedTensor, but no mask of this tensor's layout.
        """
        first = indices[0]
        if len(indices) == 1 and isinstance(first, RaggedTensor):
            if first.dtype != torch.bool or first.spec != tensor.spec:
                raise NotImplementedError(
                    "a RaggedTensor is indexed by plain tensors, or by a mask that is cut as it is, such as w[w > 0]; "
                    "gather another index with .full_tensor()"
                )
            return _Selection(local=first._local_tensor.nonzero().view(-1), places=None, mine=None)
        places = _places(tuple(tensor.shape), [_plain(index) for index in indices], tensor._local_tensor.device)
        held = tensor.extent or Extent(0, 0)
        mine = (places >= held.start) & (places < held.stop)
        return _Selection(local=places[mine] - held.start, places=places, mine=mine)

    def layout(self, tensor: RaggedTensor) -> SelectedLayout:
        """The layout of the elements. Collective if the mask is a RaggedTensor.

        Raises:
            NotImplementedError: the index does not ascend, so that a rank's elements are no run of the result.
        """
        spec, name = tensor.spec, tensor.spec.slot.name
        num_shards = spec.layout.num_shards
        if self.places is None:
            counts = torch.zeros(num_shards, dtype=torch.int64, device=spec.cluster.device)
            counts[spec.cluster.shard_index] = self.local.numel()
            stops = all_reduce(spec.cluster, counts).cumsum(0).tolist()
            return SelectedLayout(name=name, shape=(stops[-1],), stops=tuple(stops))
        flat = self.places.reshape(-1)
        if flat.numel() > 1 and not bool((flat[1:] >= flat[:-1]).all()):
            raise NotImplementedError(
                f"an index that reads elements of a RaggedTensor ({name}, shape {tuple(tensor.shape)}) must name them "
                "in ascending order, since each rank holds a run of them: sort it, or index .full_tensor()"
            )
        ends, end = [], 0
        for shard in range(num_shards):
            extent = spec.layout.extent(spec.index, shard)
            end = end if extent is None else extent.stop
            ends.append(end)
        stops = torch.searchsorted(flat, torch.tensor(ends, device=flat.device)).tolist()
        return SelectedLayout(name=name, shape=tuple(self.places.shape), stops=tuple(stops))

    def own_values(self, tensor: RaggedTensor, values: Tensor) -> Tensor:
        """Select of `values`, which are one number or broadcast to the selection, those of this rank's elements.

        Raises:
            ValueError: `values` is a RaggedTensor that is cut otherwise.
        """
        if isinstance(values, RaggedTensor):
            local = values._local_tensor
            if local.numel() != self.local.numel():
                raise ValueError(
                    f"values of shape {tuple(values.shape)}, of which this rank holds {local.numel()}, do not fit a "
                    f"selection of which it holds {self.local.numel()}: they must be cut alike, as w[mask] is"
                )
            return local
        values = whole_of(values) if is_torch_dtensor(values) else values
        if values.numel() == 1:
            return values.reshape(())
        if self.places is not None and self.mine is not None:
            return values.to(self.mine.device).expand(self.places.shape)[self.mine]
        layout = self.layout(tensor)
        own = layout.extent(0, tensor.spec.cluster.shard_index) or Extent(0, 0)
        return values.expand(layout.shape)[own.start : own.stop]


def _plain(index: Any) -> Tensor | None:
    if isinstance(index, RaggedTensor):
        raise NotImplementedError(
            "a RaggedTensor cannot be one of several indices, as this rank holds only a part of it; give .full_tensor()"
        )
    return whole_of(index) if is_torch_dtensor(index) else index


def _places(shape: tuple[int, ...], indices: list[Tensor | None], device: torch.device) -> Tensor:
    """The flat places that `indices` name in a tensor of `shape`, in the shape of what torch would return."""
    moved = [index if index is None else index.to(device) for index in indices]
    first = moved[0]
    if len(moved) == 1 and first is not None and first.dtype == torch.bool and tuple(first.shape) == shape:
        return first.reshape(-1).nonzero().view(-1)
    total: Tensor | None = None
    for dim, size in enumerate(shape):  # tensors of one size's memory, whatever `shape` is
        view = [1] * len(shape)
        view[dim] = size
        along = torch.arange(size, device=device).view(view).expand(shape)
        own = aten.index.Tensor(along, moved) * math.prod(shape[dim + 1 :])
        total = own if total is None else total + own
    assert total is not None, "a scalar has no index but a mask"
    return total
