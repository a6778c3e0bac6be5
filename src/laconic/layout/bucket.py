"""RaggedShard: which rank holds which elements of which tensor.

A layout is arithmetic on (shapes, blocks, number of shards): nothing in it is as long as the world, and every rank
derives every other rank's part from it without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Extent:
    """A run [start, stop) of one tensor's flattened elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in the run."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One tensor's place in a bucket."""

    name: str
    """Fully qualified within the unit."""
    shape: tuple[int, ...]
    """Global shape."""
    block: int
    """Elements that must not be cut apart, counted from the tensor's beginning."""
    offset: int
    """Where the tensor begins in the bucket, in elements."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Tensors placed in `num_shards` equal shards of `shard_numel` elements so that no block straddles a border."""

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def padding(self) -> int:
        """Elements of the bucket that belong to no tensor."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def extent(self, index: int, shard: int) -> Extent | None:
        """The part of tensor `index` that lies in `shard`; None if there is none."""
        slot = self.slots[index]
        low = max(slot.offset, shard * self.shard_numel)
        high = min(slot.offset + slot.numel, (shard + 1) * self.shard_numel)
        return Extent(low - slot.offset, high - slot.offset) if low < high else None

    def holders(self, index: int) -> range:
        """The shards that hold something of tensor `index`, and perhaps one that does not."""
        slot = self.slots[index]
        return range(
            slot.offset // self.shard_numel, min(-(-(slot.offset + slot.numel) // self.shard_numel), self.num_shards)
        )

    def offset_in_shard(self, index: int, shard: int) -> int:
        """Where the extent begins inside its shard; 0 for an empty one."""
        extent = self.extent(index, shard)
        return 0 if extent is None else self.slots[index].offset + extent.start - shard * self.shard_numel


def row_block(shape: Sequence[int]) -> int:
    """The default granularity: one row, the innermost contiguous run; single elements for vectors and scalars."""
    return shape[-1] if len(shape) > 1 and shape[-1] > 0 else 1


def boxes(shape: tuple[int, ...], extent: Extent) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an extent of a tensor into axis-aligned boxes, as (offsets, sizes), in flattened order.

    A k-dimensional tensor needs at most 2 (k - 1) + 1 of them: partial row, partial plane, ..., whole planes, ...,
    partial row. This is how a flat range becomes shards of torch.distributed.checkpoint (veScale-FSDP, arXiv
    2602.22437).
    """
    if extent.numel == 0:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = extent.start // inner, (extent.stop - 1) // inner
    if first == last and extent.numel < inner:  # inside one index of the leading dim: descend
        part = Extent(extent.start - first * inner, extent.stop - first * inner)
        return [((first, *offset), (1, *size)) for offset, size in boxes(shape[1:], part)]
    low = -(-extent.start // inner)  # whole indices [low, high) of the leading dim
    high = extent.stop // inner
    head = boxes(shape, Extent(extent.start, low * inner)) if extent.start < low * inner else []
    tail = boxes(shape, Extent(high * inner, extent.stop)) if high * inner < extent.stop else []
    zeros = (0,) * (len(shape) - 1)
    body = [((low, *zeros), (high - low, *shape[1:]))] if low < high else []
    return head + body + tail


@dataclass(frozen=True, kw_only=True)
class DerivedLayout:
    """A tensor with `items` entries for every `elements` elements of another one, cut wherever that one is cut.

    What an optimizer keeps per block, such as one scale per quantised tile, lives so beside its parameter: derived from
    the parameter's layout without a message. It has no place in a bucket, so shards hold different numbers of entries.
    """

    base: BucketLayout
    index: int
    """The other tensor's slot in `base`."""
    shape: tuple[int, ...]
    """Global shape: `items` entries for each run of `elements` elements, also for a shorter one at the end."""
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
        """The tensor alone, as slot 0."""
        return (Slot(name=self.base.slots[self.index].name, shape=self.shape, block=self.items, offset=0),)

    @property
    def num_shards(self) -> int:
        """As many as the other tensor's bucket has."""
        return self.base.num_shards

    def extent(self, index: int, shard: int) -> Extent | None:
        """The entries that belong to the other tensor's elements in `shard`; None if there are none."""
        extent = self.base.extent(self.index, shard)
        if extent is None:
            return None
        first, last = extent.start // self.elements, -(-extent.stop // self.elements)
        return Extent(first * self.items, last * self.items)

    def holders(self, index: int) -> range:
        """The shards that hold something of the tensor, and perhaps one that does not."""
        return self.base.holders(self.index)


def _granularity_of(elements: int, shape: tuple[int, ...]) -> str:
    rows, rest = divmod(elements, row_block(shape))
    return f"laconic.elements({elements})" if rest or len(shape) < 2 else f"laconic.rows({rows})"
