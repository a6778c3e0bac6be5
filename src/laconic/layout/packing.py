"""Packs tensors into equal shards without cutting blocks. A pure function of shapes and blocks.

[Note: Exact placement for a given order and shard size]
Tensor t (e elements, block g) must start where every shard border inside it falls on one of its block edges. Whether a
start is legal depends on that start alone, and order only asks that a tensor begin where the previous one ended or
later. So the write pointer is the whole state, the earliest legal start is monotone in it, and greedy placement is
exact: if any layout of this order and shard size fits, greedy fits. Feasibility is *not* monotone in the shard size S
(e = 6, g = 2 on 3 shards: 2 works, 3 does not, 4 does), so S is searched upward, skipping sizes that a long tensor (e
>= 2 S) rules out: such a tensor has two borders S apart inside it and therefore needs S to be a multiple of g.
The problem is veScale-FSDP's (arXiv 2602.22437), which solves it by a heuristic.

[Note: Which shard sizes are tried]
A shard holds whole pieces of tensors, so a shard of S holds no more than one of d * floor(S / d), d being the greatest
common divisor of all tensors and blocks: one size per multiple of d is enough. Vectors that may be cut anywhere, and
what is tiny, would make d tiny, though they weigh nothing, so d is that of the other tensors, and beside its multiples,
where long tensors fit best, sizes are tried in steps of 1/2048 of the shard. Below 2048 elements per shard that is
every size. No size is tried at which a tensor cannot be placed even alone, or at which the shards together hold too few
whole blocks of some size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from laconic.layout.bucket import BucketLayout, Slot

SHARD_ALIGNMENT_BYTES = 16
"""Shards start on 16-byte borders, or NCCL falls onto a slow path (pytorch #195450, NCCL #413)."""
NEGLIGIBLE = 0.005
"""Of a unit's elements: what a plan may waste for 16-byte tensor starts, for whole rows that nobody asked for, or for
one collective less."""
_FINE, _FINEST = 11, 20
"""Shard sizes are told apart to 2 ** -11 of themselves, special ones to 2 ** -20."""

Tensors = tuple[tuple[int, int], ...]
"""(numel, block) of each, in order; all that a plan depends on."""


class Packing(NamedTuple):
    """Where tensors lie: the size of all shards, and each tensor's start in the bucket."""

    shard_numel: int
    offsets: tuple[int, ...]


def plan_bucket(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], *, num_shards: int, itemsize: int
) -> BucketLayout:
    """Place tensors, in the given order, into `num_shards` shards of the smallest feasible size.

    Args:
        names, shapes, blocks: one entry per tensor; blocks in elements.
        num_shards: N x L, the ranks that share the bucket.
        itemsize: bytes of the smallest dtype the bucket will be stored or sent in; sets the alignment of shards.

    Raises:
        ValueError: a block of zero elements.
    """
    for name, block in zip(names, blocks, strict=True):
        if block < 1:
            raise ValueError(f"{name}: a block needs at least one element, got {block}")
    tensors = tuple((math.prod(shape), block) for shape, block in zip(shapes, blocks, strict=True))
    packing = pack(tensors, num_shards, quantum_of(itemsize))
    assert packing is not None  # one shard can hold everything
    slots = tuple(
        Slot(name=name, shape=tuple(shape), block=block, offset=offset)
        for name, shape, block, offset in zip(names, shapes, blocks, packing.offsets, strict=True)
    )
    return BucketLayout(slots=slots, num_shards=num_shards, shard_numel=packing.shard_numel)


def quantum_of(itemsize: int) -> int:
    """Elements of `itemsize` bytes that make 16 bytes: what shard sizes are multiples of."""
    return max(1, SHARD_ALIGNMENT_BYTES // itemsize)


@lru_cache(maxsize=1024)  # the layers of a model share one plan
def pack(tensors: Tensors, num_shards: int, quantum: int, limit: int | None = None) -> Packing | None:
    """Pack tensors, in order, into shards of the smallest feasible size; None if that is above `limit`.

    Tensors start on multiples of `quantum` too (16 bytes: vector loads, grouped matrix products) unless that would
    take more than 0.5 % more.
    """
    shard_numel = smallest_shard(tensors, num_shards, quantum, limit=limit)
    if shard_numel is None:
        return None
    best, chosen = shard_numel, tensors
    # Where all pieces are multiples of q, or as small as one likes, greedy placement starts on multiples of q anyway.
    if not all(e % quantum == 0 and (g % quantum == 0 or quantum % g == 0) for e, g in set(tensors)):
        # A tensor that starts on a multiple of q, as shards do, is one of roundup(e, q) elements, blocks of lcm(g, q).
        aligned = tuple((round_up(numel, quantum), math.lcm(block, quantum)) for numel, block in tensors)
        bound = int(shard_numel * (1 + NEGLIGIBLE))
        with_starts = smallest_shard(aligned, num_shards, quantum, start=shard_numel, limit=bound)
        best, chosen = (best, chosen) if with_starts is None else (with_starts, aligned)
    offsets = place(chosen, num_shards, best)
    assert offsets is not None
    return Packing(best, offsets)


def smallest_shard(
    tensors: Tensors, num_shards: int, quantum: int, *, start: int = 0, limit: int | None = None
) -> int | None:
    """The smallest feasible shard size from `start` to `limit`, a multiple of `quantum`; None if there is none."""
    stream = _Stream(tensors)
    sizes = shard_candidates(tensors, num_shards, quantum, start=start, limit=limit)
    return next((size for size in sizes if stream.fits(num_shards, size)), None)


def shard_candidates(
    tensors: Tensors, num_shards: int, quantum: int, *, start: int = 0, limit: int | None = None
) -> Iterator[int]:
    """Shard sizes, ascending, that no tensor alone rules out, nor the sum: [Note: Which shard sizes are tried].

    The first is a lower bound for the bucket; the last, everything on the first rank, is always feasible.
    """
    kinds = set(tensors)
    total = sum(numel for numel, _ in tensors)
    top = round_up(max(total, 1), quantum)
    top = top if limit is None else min(top, limit)
    floor = max((min(e, g) for e, g in kinds), default=1)
    size = round_up(max(-(-total // num_shards), floor, start, 1), quantum)
    firm = [math.gcd(e, g) for e, g in kinds if g > quantum and e > size >> _FINE]
    divisor = math.gcd(*firm)
    of_block: Counter[int] = Counter()  # elements in whole blocks of each size
    for e, g in tensors:
        of_block[g] += e // g * g

    def may_fit(size: int) -> bool:
        return all(num_shards * (size // g * g) >= whole for g, whole in of_block.items()) and all(
            size % g == 0 or size // g * g >= e - size for e, g in kinds if e > size
        )

    while size <= top:
        long = [(e, g) for e, g in kinds if e >= 2 * size]
        step = math.lcm(quantum, *(g for _, g in long))
        last = min([top, *(e // 2 for e, _ in long)])  # up to here the set of long tensors stays the same
        size = round_up(size, step)
        while size <= last:
            if may_fit(size):
                yield size
            grains = [max(divisor, size >> _FINEST)] if firm else []
            if len(firm) < len(kinds):
                grains.append(max(1, size >> _FINE))
            size = min(round_up((size // grain + 1) * grain, step) for grain in grains)
        size = round_up(last + 1, quantum)


class _Stream:
    """Tensors in order, with sums that find the one on a border without walking over those before it."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.ends = [0, *accumulate(numel for numel, _ in tensors)]

    def fits(self, num_shards: int, shard_numel: int) -> bool:
        """Whether `place` succeeds, in O(min(tensors, shards)) steps and fewer where it does not."""
        ends, tensors = self.ends, self.tensors
        slack = num_shards * shard_numel - ends[-1]  # gaps that may still be left
        index = at = 0  # the next tensor, and the pointer within its shard
        while slack >= 0:
            crossing = bisect_right(ends, ends[index] + shard_numel - at) - 1  # first that ends beyond the border
            if crossing >= len(tensors):
                return True
            at += ends[crossing] - ends[index]
            numel, block = tensors[crossing]
            room = shard_numel - at
            before = room // block * block
            if numel - before <= shard_numel:  # the case of `earliest` with one border inside, or a start on it
                slack -= room - before
                at = (numel - before) % shard_numel
            else:
                offset = earliest(at, numel, block, shard_numel)
                if offset is None:
                    return False
                slack -= offset - at
                at = (offset + numel) % shard_numel
            index = crossing + 1
        return False


def place(tensors: Sequence[tuple[int, int]], num_shards: int, shard_numel: int) -> tuple[int, ...] | None:
    """Offsets of tensors (numel, block), in order, in a bucket of `num_shards` shards; None if they do not fit."""
    pointer = 0
    offsets = []
    for numel, block in tensors:
        offset = earliest(pointer, numel, block, shard_numel)
        if offset is None or offset + numel > num_shards * shard_numel:
            return None
        offsets.append(offset)
        pointer = offset + numel
    return tuple(offsets)


def earliest(pointer: int, numel: int, block: int, shard_numel: int) -> int | None:
    """The smallest start >= pointer at which no shard border cuts a block of the tensor; None if there is none.

    Reference: tests/reference/planner.py. Source: [Note: Exact placement for a given order and shard size].
    """
    border = (pointer // shard_numel + 1) * shard_numel  # first border after the pointer
    if pointer + numel <= border:
        return pointer
    on_edges = shard_numel % block == 0  # then one border on an edge puts all of them on edges
    start = border - (border - pointer) // block * block  # first start whose cut at `border` is on an edge
    if start < border and (start + numel <= border + shard_numel or on_edges):
        return start
    if numel <= shard_numel or on_edges:
        return border
    shift = shard_numel % block  # start after the border so that the cut at the next one is on an edge
    if shard_numel >= block and shift + numel <= 2 * shard_numel:
        return border + shift
    return None


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple >= value."""
    return -(-value // multiple) * multiple
