"""The layout of a bucket: where its tensors lie, and which part of each tensor a shard holds.

A layout is arithmetic on shapes, blocks and the number of shards. None of its fields grows with the number of ranks,
but for the borders of unequal shards. Every rank computes the parts of all other ranks from it without a message.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Extent:
    """A run [start, stop) of one tensor's flattened elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements in the run."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One tensor's place in a bucket, with its name within the unit and its global shape."""

    name: str
    shape: tuple[int, ...]
    block: int
    """The elements of a block, counted from the tensor's beginning. A border between shards never cuts a block."""
    offset: int
    """The element of the bucket at which the tensor begins."""

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Tensors in shards, of `shard_numel` elements each unless `stops` says otherwise. No border cuts a block."""

    slots: tuple[Slot, ...]
    """The tensors' places, in the order of their offsets."""
    num_shards: int
    shard_numel: int
    """The elements of a shard; of the largest, if they are unequal."""
    stops: tuple[int, ...] = ()
    """The element at which each shard ends, if they are unequal: [Note: Unequal shards] in layout/shares.py."""

    @classmethod
    def whole_in(cls, shard: int, *, name: str, shape: tuple[int, ...], num_shards: int) -> BucketLayout:
        """The layout of a single tensor that lies whole in one shard; the other shards hold nothing."""
        size = max(1, math.prod(shape))
        slot = Slot(name=name, shape=shape, block=size, offset=shard * size)
        return cls(slots=(slot,), num_shards=num_shards, shard_numel=size)

    @property
    def numel(self) -> int:
        """The number of elements of the bucket, with padding."""
        return self.start(self.num_shards)

    def start(self, shard: int) -> int:
        """The element at which `shard` begins; for `num_shards`, where the last one ends."""
        if not self.stops:
            return shard * self.shard_numel
        return self.stops[shard - 1] if shard else 0

    def size(self, shard: int) -> int:
        """The number of elements of `shard`, with padding."""
        return self.start(shard + 1) - self.start(shard)

    @cached_property
    def padding(self) -> int:
        """The number of elements of the bucket that belong to no tensor."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def extent(self, index: int, shard: int) -> Extent | None:
        """The part of tensor `index` that lies in `shard`; None if no element does."""
        slot = self.slots[index]
        low = max(slot.offset, self.start(shard))
        high = min(slot.offset + slot.numel, self.start(shard + 1))
        return Extent(low - slot.offset, high - slot.offset) if low < high else None

    def numels_by_shard(self) -> list[list[int]]:
        """The elements of each tensor in each shard."""
        extents = ([self.extent(index, shard) for index in range(len(self.slots))] for shard in range(self.num_shards))
        return [[0 if extent is None else extent.numel for extent in own] for own in extents]

    def holders(self, index: int) -> range:
        """The shards that hold a part of tensor `index`. For an empty tensor this may be one shard."""
        slot = self.slots[index]
        if self.stops:
            first, last = bisect_right(self.stops, slot.offset), bisect_left(self.stops, slot.offset + slot.numel)
            return range(first, min(last + 1, self.num_shards))
        stop = -(-(slot.offset + slot.numel) // self.shard_numel)
        return range(slot.offset // self.shard_numel, min(stop, self.num_shards))

    def rows(self, index: int, start: int, stop: int, *, keep_dim: bool) -> BucketLayout:
        """The layout of rows [start, stop) of tensor `index` alone; of one row without dim 0, unless `keep_dim`."""
        slot = self.slots[index]
        shape = (stop - start, *slot.shape[1:]) if keep_dim else slot.shape[1:]
        offset = slot.offset + start * math.prod(slot.shape[1:])
        return replace(self, slots=(replace(slot, shape=shape, offset=offset),))

    def offset_in_shard(self, index: int, shard: int) -> int:
        """The element of `shard` at which the extent of tensor `index` begins; 0 if there is no extent."""
        extent = self.extent(index, shard)
        return 0 if extent is None else self.slots[index].offset + extent.start - self.start(shard)


def row_block(shape: Sequence[int]) -> int:
    """The elements of a default block: one row, the innermost contiguous run. One for vectors and scalars."""
    return shape[-1] if len(shape) > 1 and shape[-1] > 0 else 1


def boxes(shape: tuple[int, ...], extent: Extent) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an extent of a tensor into axis-aligned boxes (offsets, sizes), in flattened order.

    torch.distributed.checkpoint describes the parts of a tensor by such boxes. An extent of a k-dimensional tensor
    needs at most 2 (k - 1) + 1 of them: a partial row, a partial plane, ..., whole planes, ..., a partial row.
    Source: veScale-FSDP (arXiv 2602.22437).
    """
    if extent.numel == 0:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = extent.start // inner, (extent.stop - 1) // inner
    if first == last and extent.numel < inner:  # the extent lies inside one index of the leading dim
        part = Extent(extent.start - first * inner, extent.stop - first * inner)
        return [((first, *offset), (1, *size)) for offset, size in boxes(shape[1:], part)]
    low = -(-extent.start // inner)  # [low, high) are the indices of the leading dim that the extent holds whole
    high = extent.stop // inner
    head = boxes(shape, Extent(extent.start, low * inner)) if extent.start < low * inner else []
    tail = boxes(shape, Extent(high * inner, extent.stop)) if high * inner < extent.stop else []
    zeros = (0,) * (len(shape) - 1)
    body = [((low, *zeros), (high - low, *shape[1:]))] if low < high else []
    return head + body + tail


@dataclass(frozen=True, kw_only=True)
class DerivedLayout:
    """A tensor with `items` entries per run of `elements` elements of a parameter, cut where the parameter is cut.

    Every rank derives this layout from the parameter's layout, without a message. The tensor has no place in a bucket,
    so shards may hold different numbers of its entries. The parameter is slot `index` of `base`, its bucket.

    Raises:
        ValueError: a border between shards cuts a run of the parameter. The message names the granularity to ask for.
    """

    base: BucketLayout
    index: int
    shape: tuple[int, ...]
    """The global shape of the derived tensor: a shorter run at the parameter's end has `items` entries too."""
    elements: int
    items: int

    def __post_init__(self) -> None:
        slot = self.base.slots[self.index]
        assert math.prod(self.shape) == -(-slot.numel // self.elements) * self.items
        for shard in self.base.holders(self.index):
            extent = self.base.extent(self.index, shard)
            if extent is not None and extent.stop % self.elements and extent.stop != slot.numel:
                raise ValueError(
                    f"{slot.name} of shape {slot.shape} is cut after element {extent.stop}, inside a block of "
                    f"{self.elements} elements that must stay together; shard it with "
                    f"granularity={_granularity_of(self.elements, slot.shape)}"
                )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The derived tensor alone, as slot 0."""
        return (Slot(name=self.base.slots[self.index].name, shape=self.shape, block=self.items, offset=0),)

    @property
    def num_shards(self) -> int:
        """The number of shards of the parameter's bucket."""
        return self.base.num_shards

    def extent(self, index: int, shard: int) -> Extent | None:
        """The entries that belong to the parameter's elements in `shard`; None if there are none."""
        extent = self.base.extent(self.index, shard)
        if extent is None:
            return None
        first, last = extent.start // self.elements, -(-extent.stop // self.elements)
        return Extent(first * self.items, last * self.items)

    def holders(self, index: int) -> range:
        """See `BucketLayout.holders`."""
        return self.base.holders(self.index)


def _granularity_of(elements: int, shape: tuple[int, ...]) -> str:
    rows, rest = divmod(elements, row_block(shape))
    return f"laconic.elements({elements})" if rest or len(shape) < 2 else f"laconic.rows({rows})"


@dataclass(frozen=True, kw_only=True)
class SelectedLayout:
    """Elements of one tensor, of which shard s holds the run that ends at `stops[s]`. Runs come in order of shards."""

    name: str
    shape: tuple[int, ...]
    """The shape of the selection."""
    stops: tuple[int, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The selection alone, as slot 0."""
        return (Slot(name=self.name, shape=self.shape, block=1, offset=0),)

    @property
    def num_shards(self) -> int:
        """The number of shards that the elements come from."""
        return len(self.stops)

    def extent(self, index: int, shard: int) -> Extent | None:
        """The run that lies in `shard`; None if no element does."""
        start = self.stops[shard - 1] if shard else 0
        return Extent(start, self.stops[shard]) if start < self.stops[shard] else None

    def holders(self, index: int) -> range:
        """See `BucketLayout.holders`."""
        return range(self.num_shards)


@dataclass(frozen=True, kw_only=True)
class JointLayout:
    """Tensors one after the other, flat, each cut over ranks of its own, as one tensor over all these ranks."""

    parts: tuple[BucketLayout, ...]
    """The layout of each of the tensors: its slot 0."""
    places: tuple[tuple[int, int], ...]
    """For each shard of the whole: the index in `parts` of the tensor that it has a run of, and the shard there."""

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The whole alone, flat, as slot 0."""
        numel = sum(part.slots[0].numel for part in self.parts)
        return (Slot(name=self.parts[0].slots[0].name, shape=(numel,), block=1, offset=0),)

    @property
    def num_shards(self) -> int:
        """The number of ranks that have a run of one of the tensors."""
        return len(self.places)

    @cached_property
    def _starts(self) -> list[int]:
        """The element of the whole at which each of the tensors begins."""
        return [0, *itertools.accumulate(part.slots[0].numel for part in self.parts)]

    def extent(self, index: int, shard: int) -> Extent | None:
        """The run that lies in `shard`; None if no element does."""
        part, own = self.places[shard]
        extent = self.parts[part].extent(0, own)
        start = self._starts[part]
        return None if extent is None else Extent(start + extent.start, start + extent.stop)

    def holders(self, index: int) -> range:
        """See `BucketLayout.holders`."""
        return range(self.num_shards)
