"""Parts of a RaggedTensor that Python's brackets name: rows, runs of rows, and elements by index or mask.

[Note: Indexing]
No part of the tensor crosses the wire. Rows are views. Elements that an index or a mask names are read into another
RaggedTensor, which each rank holds the part of that it held before; so `w[mask] = -w[mask]` is local, `w[mask].sum()`
counts all elements, and `w[mask].to_local()` has this rank's. A write changes the elements that this rank holds. An
index or mask that is a plain tensor is the same on every rank, so that even one rank may read alone. Of a mask that is
a RaggedTensor, such as `w > 0`, a rank knows its part only: to read by it, the ranks exchange a number each.

Which rows or elements a call names, torch itself says: it makes the views of a tensor without memory, and takes the
elements of tensors that have coordinates in place of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from laconic.comm.collectives import all_reduce
from laconic.layout.bucket import Extent, RunsLayout
from laconic.ragged.dispatch import arguments_of, implements, remedy_for, results_on_meta
from laconic.ragged.dtensor import is_torch_dtensor, whole_of
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

aten = torch.ops.aten


def _refuse_other_dims(func: Any, source: RaggedTensor, dim: int) -> None:
    if source.dim() == 0 or dim % source.dim() != 0:
        raise NotImplementedError(
            f"{func} on dim {dim}: only whole rows of a RaggedTensor can be taken (dim 0). {remedy_for(func)}"
        )


@implements(aten.select.int, aten.slice.Tensor, aten.split, aten.split_with_sizes)
@implements(aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unbind)
def _rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor | list[RaggedTensor]:
    source, given = args[0], arguments_of(func, args, kwargs)
    _refuse_other_dims(func, source, given["dim"])
    if (step := given.get("step", 1)) != 1:
        raise NotImplementedError(f"rows of a RaggedTensor (dim 0) can be sliced with step 1 only, not {step}")
    views = []
    for piece in results_on_meta(func, args, kwargs) or ():
        start, keep_dim = piece.storage_offset() // max(1, math.prod(source.shape[1:])), piece.dim() == source.dim()
        views.append(source.rows(start, start + (piece.shape[0] if keep_dim else 1), keep_dim=keep_dim))
    return views[0] if func.overloadpacket in (aten.select, aten.slice) else views


@implements(aten.index.Tensor, aten.masked_select, aten.index_select, asks_torch=True)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    source = _cut_alone(func, args[0])
    chosen = _Selection(source, func, *args[1:])
    spec = RaggedSpec(cluster=source.spec.cluster, layout=chosen.layout(), index=0)
    return RaggedTensor(source._local_tensor[chosen.local], spec, device=source.device)


@implements(aten.index_put_, aten._index_put_impl_, aten.index_fill_, asks_torch=True)
def _index_put_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    target, given = _cut_alone(func, args[0]), arguments_of(func, args, kwargs)
    if func.overloadpacket is aten.index_fill_:
        chosen, values = _Selection(target, aten.index_select.default, *args[1:3]), given["value"]
    else:
        chosen, values = _Selection(target, aten.index.Tensor, args[1]), given["values"]
    local = target._local_tensor
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=target.dtype, device=local.device)
    own = chosen.own_values(values).to(local.device)
    local.index_put_((chosen.local,), own, bool(given.get("accumulate")))
    target.note_change()
    return target


def _cut_alone(func: Any, operand: Any) -> RaggedTensor:
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


class _Selection:
    """The elements of a RaggedTensor that an index or a mask names: [Note: Indexing]."""

    def __init__(self, tensor: RaggedTensor, take: Any, *indices: Any) -> None:
        """Select what `take`, an aten function, takes of `tensor` by `indices`.

        Raises:
            NotImplementedError: an index is a RaggedTensor, but no mask of this tensor's layout.
        """
        self._tensor, device, held = tensor, tensor._local_tensor.device, tensor.spec.held
        self.places: Tensor | None = None
        """The elements of all ranks, as flat places in the tensor, in the shape of the result; None for a mask that is
        cut itself."""
        given = [each for each in tree_leaves(indices) if isinstance(each, Tensor)]
        if any(isinstance(each, RaggedTensor) for each in given):
            self.local = _mask_of(tensor, given)._local_tensor.nonzero().view(-1)
            return

        def whole(index: Any) -> Any:
            return (whole_of(index) if is_torch_dtensor(index) else index).to(device)

        rest = tree_map(lambda each: whole(each) if isinstance(each, Tensor) else each, indices)
        places: Any
        if given[0].dtype == torch.bool and given[0].shape == tensor.shape:  # in one look at the mask
            places = whole(given[0]).reshape(-1).nonzero().view(-1)
        else:
            places = sum(take(each, *rest) for each in _coordinates(tuple(tensor.shape), device))
        self.places = places
        self._mine = (places >= held.start) & (places < held.stop)
        self.local = places[self._mine] - held.start
        """Those that this rank holds, as places in its part, in the order of the index."""

    def layout(self) -> RunsLayout:
        """The layout of the elements. Collective if the mask is a RaggedTensor.

        Raises:
            NotImplementedError: the index does not ascend, so that a rank's elements are no run of the result.
        """
        spec, name = self._tensor.spec, self._tensor.spec.slot.name
        num_shards = spec.layout.num_shards
        if self.places is None:
            counts = torch.zeros(num_shards, dtype=torch.int64, device=spec.cluster.device)
            counts[spec.cluster.shard_index] = self.local.numel()
            stops = all_reduce(spec.cluster, counts).cumsum(0).tolist()
            return RunsLayout.of(name, (stops[-1],), _runs(stops))
        flat = self.places.reshape(-1)
        if flat.numel() > 1 and not bool((flat[1:] >= flat[:-1]).all()):
            raise NotImplementedError(
                f"an index that reads elements of a RaggedTensor ({name}, shape {tuple(self._tensor.shape)}) must name "
                "them in ascending order, since each rank holds a run of them: sort it, or index .full_tensor()"
            )
        ends, end = [], 0
        for shard in range(num_shards):
            extent = spec.layout.extent(spec.index, shard)
            end = end if extent is None else extent.stop
            ends.append(end)
        stops = torch.searchsorted(flat, torch.tensor(ends, device=flat.device)).tolist()
        return RunsLayout.of(name, tuple(self.places.shape), _runs(stops))

    def own_values(self, values: Tensor) -> Tensor:
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
        if self.places is not None:
            return values.to(self._mine.device).expand(self.places.shape)[self._mine]
        layout = self.layout()
        own = layout.extent(0, self._tensor.spec.cluster.shard_index) or Extent(0, 0)
        return values.expand(layout.shape)[own.start : own.stop]


def _mask_of(tensor: RaggedTensor, indices: list[Tensor]) -> RaggedTensor:
    """The only one of `indices`, which is a mask in the layout of `tensor`."""
    first, *others = indices
    if others:
        raise NotImplementedError(
            "a RaggedTensor cannot be one of several indices, as this rank holds only a part of it; give .full_tensor()"
        )
    assert isinstance(first, RaggedTensor)
    if first.dtype != torch.bool or first.spec != tensor.spec:
        raise NotImplementedError(
            "a RaggedTensor is indexed by plain tensors, or by a mask that is cut as it is, such as w[w > 0]; "
            "gather another index with .full_tensor()"
        )
    return first


def _runs(stops: list[int]) -> list[Extent]:
    return [Extent(start, stop) for start, stop in pairwise((0, *stops))]


def _coordinates(shape: tuple[int, ...], device: torch.device) -> Iterator[Tensor]:
    """Tensors of `shape` whose sum has each element's flat place, each in the memory of one size's indices."""
    if not shape:
        yield torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        view = [1] * len(shape)
        view[dim] = size
        yield (torch.arange(size, device=device) * math.prod(shape[dim + 1 :])).view(view).expand(shape)
