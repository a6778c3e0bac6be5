"""The layout of a bucket: where its tensors lie, and which part of each tensor a shard holds.

A layout is arithmetic on shapes, blocks and the number of shards. None of its fields grows with the number of ranks,
but for the borders of unequal shards. Every rank computes the parts of all other ranks from it without a message.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
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

    def holders(self, index: int) -> Collection[int]:
        """The shards that hold a part of tensor `index`, in order. For an empty tensor this may be one shard."""
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
class RunsLayout:
    """One tensor alone, which has no place in a bucket: some shards hold a run of its elements each."""

    name: str
    shape: tuple[int, ...]
    num_shards: int
    runs: tuple[tuple[int, Extent], ...]
    """(shard, its run) for each shard that holds an element."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], extents: Sequence[Extent | None]) -> RunsLayout:
        """The layout with these runs, one for each shard."""
        runs = tuple((shard, extent) for shard, extent in enumerate(extents) if extent is not None and extent.numel)
        return cls(name=name, shape=shape, num_shards=len(extents), runs=runs)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The tensor as slot 0."""
        return (Slot(name=self.name, shape=self.shape, block=1, offset=0),)

    @cached_property
    def _by_shard(self) -> dict[int, Extent]:
        return dict(self.runs)

    def extent(self, index: int, shard: int) -> Extent | None:
        """The run that lies in `shard`; None if no element does."""
        return self._by_shard.get(shard)

    def holders(self, index: int) -> Collection[int]:
        """See `BucketLayout.holders`."""
        return self._by_shard.keys()


def derived(base: BucketLayout, index: int, *, shape: tuple[int, ...], elements: int, items: int) -> RunsLayout:
    """Lay out a tensor with `items` entries per run of `elements` elements of a parameter, cut as the parameter is.

    Every rank derives this layout from the parameter's, slot `index` of `base`, without a message. `shape` is that of
    the derived tensor: a shorter run at the parameter's end has `items` entries too.

    Raises:
        ValueError: a border between shards cuts a run of the parameter. The message names the granularity to ask for.
    """
    slot, runs = base.slots[index], []
    assert math.prod(shape) == -(-slot.numel // elements) * items
    for shard in base.holders(index):
        extent = base.extent(index, shard)
        if extent is None:
            continue
        if extent.stop % elements and extent.stop != slot.numel:
            rows, rest = divmod(elements, row_block(slot.shape))
            is_by_rows = not rest and len(slot.shape) > 1
            raise ValueError(
                f"{slot.name} of shape {slot.shape} is cut after element {extent.stop}, inside a block of "
                f"{elements} elements that must stay together; shard it with "
                f"granularity={f'laconic.rows({rows})' if is_by_rows else f'laconic.elements({elements})'}"
            )
        run = Extent(extent.start // elements * items, -(-extent.stop // elements) * items)
        runs.append((shard, run))
    return RunsLayout(name=slot.name, shape=shape, num_shards=base.num_shards, runs=tuple(runs))
