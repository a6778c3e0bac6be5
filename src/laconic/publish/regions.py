"""Which elements of each tensor a rank publishes, and where they lie in the tensor.

[Note: Who publishes an element]
A rank holds runs or boxes of each tensor: the extent of a RaggedTensor, the chunk of a DTensor, all of a plain tensor.
Others may hold the same: replicas of DDP and of islands, adapters that are whole on each rank. Holders of an equal run
of a parameter cut it evenly among themselves, so each of them compares and writes its share, and all copies of what was
published last take the memory of one model. Buffers are those of the lowest rank that holds them, since they may differ
from rank to rank. All ranks compute the division alike, from the regions that all have told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from laconic.publish.versions import PublishError, listing
from laconic.ragged.parts import BoxedTensor
from laconic.ragged.tensor import RaggedTensor

_LEAST_SHARE = 1 << 12
"""Replicas do not cut a run into shares of fewer elements."""

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the sizes of a run or a box: [Note: A published version] in versions.py."""


Addends = Callable[[], Iterator[Tensor]]
"""Makes whole tensors that are added to one, such as the products of its adapters, one after the other."""


class HeldRegion(NamedTuple):
    """A run or a box that this rank holds of a tensor."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Tensor
    """Its elements, in any shape of as many."""
    addends: Addends | None = None
    """The products of adapters that are added to the elements."""

    @property
    def place(self) -> Place:
        """Its start and its sizes."""
        return self.start, self.sizes

    def values(self, begin: int, end: int) -> Tensor:
        """The present elements [begin, end) of the region, in its order, flat.

        They are a view, or on the host: device memory is taken for one region at most.
        """
        is_view = self.addends is None and self.view.is_contiguous()
        values = (self.view if is_view else self.view.cpu()).reshape(-1)[begin:end]
        for addend in self.addends() if self.addends is not None else ():
            whole = addend.reshape(-1) if len(self.start) == 1 else addend
            for dim, (first, size) in enumerate(self.place_by_dim):
                whole = whole.narrow(dim, first, size)
            values = (values + whole.reshape(-1)[begin:end].cpu()).to(values.dtype)
        return values

    @property
    def place_by_dim(self) -> list[tuple[int, int]]:
        """The start and the size of each dim."""
        return list(zip(self.start, self.sizes, strict=True))


class Share(NamedTuple):
    """The elements of one region that this rank publishes, of those that it holds."""

    region: int
    """The region's index among those that this rank holds of the tensor."""
    begin: int
    end: int
    """The elements [begin, end) of the region, in its order."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The part of one tensor that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[HeldRegion, ...]
    is_buffer: bool = False

    def run(self, start: int, shape: tuple[int, ...]) -> Holding:
        """The part that this rank holds of another tensor, which is a run of the flattened one from `start`.

        Raises:
            PublishError: the rank holds a box, which no run is part of.
        """
        if (start, shape) == (0, self.shape):
            return self
        regions = []
        for region in self.regions:
            if len(region.start) > 1:
                raise PublishError(
                    f"a tensor of shape {list(self.shape)} is cut by another mesh axis, and folders of the hub have it "
                    'in pieces; use names="huggingface"'
                )
            first, size = region.start[0], region.sizes[0]
            low, high = max(first, start), min(first + size, start + math.prod(shape))
            if low < high:
                view = region.view.reshape(-1)[low - first : high - first]
                addends = region.addends and partial(_runs_of, region.addends, start, shape)
                regions.append(HeldRegion((low - start,), (high - low,), view, addends))
        return Holding(shape=shape, dtype=self.dtype, regions=tuple(regions), is_buffer=self.is_buffer)


def _runs_of(addends: Addends, start: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
    for addend in addends():
        yield addend.reshape(-1)[start : start + math.prod(shape)].view(shape)


@torch.no_grad()
def holding_of(tensor: Tensor, addends: Addends | None = None, *, is_buffer: bool = False) -> Holding:
    """Find what this rank holds of a tensor. It is read, not written: what crosses next does not change."""
    shape = tuple(tensor.shape)
    regions = tuple(region._replace(addends=addends) for region in _regions(tensor, shape) if region.view.numel())
    return Holding(shape=shape, dtype=tensor.dtype, regions=regions, is_buffer=is_buffer)


def _regions(tensor: Tensor, shape: tuple[int, ...]) -> Iterable[HeldRegion]:
    if isinstance(tensor, RaggedTensor) and tensor.spec.dtensor is None:
        extent = tensor.extent
        if extent is not None:
            yield HeldRegion((extent.start,), (extent.numel,), tensor.to_local().detach())
    elif isinstance(tensor, BoxedTensor):
        for offset, box in tensor.held_boxes():
            yield _region(shape, offset, box.detach())
    elif isinstance(tensor, DTensor):
        for chunk in tensor.__create_chunk_list__():
            view = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            yield _region(shape, tuple(chunk.offsets), view.detach())
    else:
        yield HeldRegion((0,), (tensor.numel(),), tensor.detach())


def _region(shape: tuple[int, ...], offset: Sequence[int], box: Tensor) -> HeldRegion:
    """A box, as a run of the flattened tensor if it is one."""
    sizes = tuple(box.shape)
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if sizes[first + 1 :] == shape[first + 1 :]:
        return HeldRegion((_flat(offset, shape),), (box.numel(),), box)
    return HeldRegion(tuple(offset), sizes, box)


def _flat(place: Sequence[int], shape: Sequence[int]) -> int:
    """The place of an element in the flattened tensor."""
    total = 0
    for index, size in zip(place, shape, strict=True):
        total = total * size + index
    return total


def flat_places(place: Place, shape: tuple[int, ...], local: Tensor) -> Tensor:
    """The places in the flattened tensor of elements `local`, (n,), int64, of a run or a box, in its order."""
    start, sizes = place
    if len(start) == 1:
        return local + start[0]
    total, stride = torch.zeros_like(local), 1
    rest = local
    for begin, size, bound in zip(reversed(start), reversed(sizes), reversed(shape), strict=True):
        total += (rest % size + begin) * stride
        rest, stride = rest // size, stride * bound
    return total


Told = Mapping[str, Sequence[Sequence[Sequence[int]]]]
"""The places of the regions that a rank holds, by tensor, as JSON has them."""


def shares_of(
    told: Sequence[Told], shapes: Mapping[str, tuple[int, ...]], buffers: Container[str], rank: int
) -> dict[str, list[Share]]:
    """Divide all elements among the ranks, by what each rank has told: [Note: Who publishes an element].

    Returns:
        The shares of this rank, by tensor.

    Raises:
        PublishError: the ranks together do not hold each element of a tensor.
    """
    holders: dict[tuple[str, Place], list[tuple[int, int]]] = defaultdict(list)
    held: dict[str, int] = defaultdict(int)
    for index, regions in enumerate(told):
        for name, places in regions.items():
            for number, (start, sizes) in enumerate(places):
                place = tuple(start), tuple(sizes)
                held[name] += 0 if holders[name, place] else math.prod(sizes)
                holders[name, place].append((index, number))
    if gaps := [name for name, shape in shapes.items() if held[name] != math.prod(shape)]:
        raise PublishError(
            f"the ranks together hold {held[gaps[0]]} of the {math.prod(shapes[gaps[0]])} elements of {listing(gaps)}; "
            "publish a model whose tensors are each whole over all ranks, cut alike on all replicas"
        )
    shares: dict[str, list[Share]] = defaultdict(list)
    for (name, place), holding in holders.items():
        numel, (start, _) = math.prod(place[1]), place
        is_cut = name not in buffers and len(start) == 1 and numel >= 2 * _LEAST_SHARE
        num_shares = min(len(holding), numel // _LEAST_SHARE) if is_cut else 1
        borders = [numel * index // num_shares for index in range(num_shares + 1)]
        for index, (holder, number) in enumerate(holding[:num_shares]):
            if holder == rank:
                shares[name].append(Share(number, borders[index], borders[index + 1]))
    return dict(shares)
