"""Packs tensors into equal chunks without cutting blocks. A pure function of shapes and blocks.

[Note: Exact placement for a given order and chunk size]
Tensor t (e elements, block g) must start where every chunk border inside it falls on one of its block edges. Whether a
start is legal depends on that start alone, and order only asks that a tensor begin where the previous one ended or
later. So the write pointer is the whole state, the earliest legal start is monotone in it, and greedy placement is
exact: if any layout of this order and chunk size fits, greedy fits. Feasibility is *not* monotone in the chunk size S
(e = 6, g = 2 on 3 chunks: 2 works, 3 does not, 4 does), so S is searched upward, skipping sizes that a long tensor (e
>= 2 S) rules out: such a tensor has two borders S apart inside it and therefore needs S to be a multiple of g.
The problem is veScale-FSDP's (arXiv 2602.22437), which solves it by a heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from laconic.shard.layout import BucketLayout, Slot

CHUNK_ALIGNMENT_BYTES = 16
"""Chunks start on 16-byte borders, or NCCL falls onto a slow path (pytorch #195450, NCCL #413)."""


def plan_bucket(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], *, num_chunks: int, itemsize: int
) -> BucketLayout:
    """Place tensors, in the given order, into `num_chunks` chunks of the smallest feasible size.

    Args:
        names, shapes, blocks: one entry per tensor; blocks in elements.
        num_chunks: N x L, the ranks that share the bucket.
        itemsize: bytes of the smallest dtype the bucket will be stored or sent in; sets the alignment of chunks.

    Raises:
        ValueError: a block of zero elements.
    """
    for name, block in zip(names, blocks, strict=True):
        if block < 1:
            raise ValueError(f"{name}: a block needs at least one element, got {block}")
    tensors = tuple((math.prod(shape), block) for shape, block in zip(shapes, blocks, strict=True))
    quantum = max(1, CHUNK_ALIGNMENT_BYTES // itemsize)
    chunk_numel, offsets = _smallest_chunk(tensors, num_chunks, quantum)
    slots = tuple(
        Slot(name=name, shape=tuple(shape), block=block, offset=offset)
        for name, shape, block, offset in zip(names, shapes, blocks, offsets, strict=True)
    )
    return BucketLayout(slots=slots, num_chunks=num_chunks, chunk_numel=chunk_numel)


@lru_cache(maxsize=256)  # the layers of a model share one plan
def _smallest_chunk(tensors: tuple[tuple[int, int], ...], num_chunks: int, quantum: int) -> tuple[int, tuple[int, ...]]:
    """The smallest feasible chunk size, and the tensors' offsets under it."""
    total = sum(numel for numel, _ in tensors)
    top = _round_up(max(total, 1), quantum)  # everything on the first rank is always feasible
    size = _round_up(max(-(-total // num_chunks), max((min(e, g) for e, g in tensors), default=1), 1), quantum)
    while size <= top:
        long = [(e, g) for e, g in tensors if e >= 2 * size]
        step = math.lcm(quantum, *(g for _, g in long))
        limit = min([top, *(e // 2 for e, _ in long)])  # up to here the set of long tensors stays the same
        for candidate in range(_round_up(size, step), limit + 1, step):
            offsets = place(tensors, num_chunks, candidate)
            if offsets is not None:
                return candidate, offsets
        size = _round_up(limit + 1, quantum)
    raise AssertionError(f"no chunk size up to {top} holds {len(tensors)} tensors, though {top} must")


def place(tensors: Sequence[tuple[int, int]], num_chunks: int, chunk_numel: int) -> tuple[int, ...] | None:
    """Offsets of tensors (numel, block), in order, in a bucket of `num_chunks` chunks; None if they do not fit."""
    pointer = 0
    offsets = []
    for numel, block in tensors:
        offset = earliest(pointer, numel, block, chunk_numel)
        if offset is None or offset + numel > num_chunks * chunk_numel:
            return None
        offsets.append(offset)
        pointer = offset + numel
    return tuple(offsets)


def earliest(pointer: int, numel: int, block: int, chunk_numel: int) -> int | None:
    """The smallest start >= pointer at which no chunk border cuts a block of the tensor; None if there is none.

    Reference: tests/reference/planner.py. Source: [Note: Exact placement for a given order and chunk size].
    """
    border = (pointer // chunk_numel + 1) * chunk_numel  # first border after the pointer
    if pointer + numel <= border:
        return pointer
    on_edges = chunk_numel % block == 0  # then one border on an edge puts all of them on edges
    start = border - (border - pointer) // block * block  # first start whose cut at `border` is on an edge
    if start < border and (start + numel <= border + chunk_numel or on_edges):
        return start
    if numel <= chunk_numel or on_edges:
        return border
    shift = chunk_numel % block  # start after the border so that the cut at the next one is on an edge
    if chunk_numel >= block and shift + numel <= 2 * chunk_numel:
        return border + shift
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
