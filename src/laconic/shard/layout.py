"""RaggedShard: which rank holds which elements of which tensor.

A layout is arithmetic on (shapes, blocks, number of chunks): nothing in it is as long as the world, and every rank
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
    """Tensors placed in `num_chunks` equal chunks of `chunk_numel` elements so that no block straddles a border."""

    slots: tuple[Slot, ...]
    num_chunks: int
    chunk_numel: int

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.num_chunks * self.chunk_numel

    @cached_property
    def padding(self) -> int:
        """Elements of the bucket that belong to no tensor."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def extent(self, index: int, chunk: int) -> Extent | None:
        """The part of tensor `index` that lies in `chunk`; None if there is none."""
        slot = self.slots[index]
        low = max(slot.offset, chunk * self.chunk_numel)
        high = min(slot.offset + slot.numel, (chunk + 1) * self.chunk_numel)
        return Extent(low - slot.offset, high - slot.offset) if low < high else None

    def holders(self, index: int) -> range:
        """The chunks that hold something of tensor `index`, and perhaps one that does not."""
        slot = self.slots[index]
        return range(
            slot.offset // self.chunk_numel, min(-(-(slot.offset + slot.numel) // self.chunk_numel), self.num_chunks)
        )

    def offset_in_chunk(self, index: int, chunk: int) -> int:
        """Where the extent begins inside its chunk; 0 for an empty one."""
        extent = self.extent(index, chunk)
        return 0 if extent is None else self.slots[index].offset + extent.start - chunk * self.chunk_numel


def row_block(shape: Sequence[int]) -> int:
    """The default granularity: one row, the innermost contiguous run; single elements for vectors and scalars."""
    return shape[-1] if len(shape) > 1 and shape[-1] > 0 else 1


def boxes(shape: tuple[int, ...], extent: Extent) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an extent of a tensor into axis-aligned boxes, as (offsets, sizes), in flattened order.

    A k-dimensional tensor needs at most 2 (k - 1) + 1 of them: partial row, partial plane, ..., whole planes, ...,
    partial row. This is how a flat range becomes chunks of torch.distributed.checkpoint (veScale-FSDP, arXiv
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
