"""Packs tensors, in a given order, into equal shards without cutting blocks. A pure function of shapes and blocks.

[Note: Exact placement for a given order and shard size]
A tensor of e elements with blocks of g elements may start at an offset only if every border between shards inside the
tensor lies on the edge of a block. Whether an offset is legal depends on the offset alone. The order demands only that
a tensor starts where the previous one ends, or later, so an earlier end never leads to a later start. Greedy placement
starts each tensor at its earliest legal offset. It is exact: if any placement in this order fits, the greedy one fits.

Larger shards do not always fit better. A tensor with e = 6 and g = 2 fits on 3 shards of S = 2 or S = 4 elements, but
not of S = 3. So the search tries shard sizes upwards. It skips sizes that a long tensor (e >= 2 S) rules out: two
borders lie S elements apart inside such a tensor, so S must be a multiple of g.
veScale-FSDP (arXiv 2602.22437) states the same problem and solves it by a heuristic.

[Note: Shard sizes to try]
Let d be the greatest common divisor of the sizes of all tensors and blocks. A shard holds whole blocks and ends of
tensors, which is a multiple of d elements. A shard of S elements holds no more than a shard of d * floor(S / d)
elements, so one size for each multiple of d is enough.

Two kinds of tensors would make d tiny, although they hardly change the plan: tensors that may be cut anywhere, and
tensors below 1/2048 of a shard. So the search takes d over the other tensors. Long tensors fit best at multiples of
this d. Beside these multiples, the search tries sizes in steps of 1/2048 of the shard, to fit the two kinds that d
leaves out. Below 2048 elements per shard it tries every size. The search skips a size at which some tensor would not
fit even alone, and a size at which all shards together hold too few whole blocks of some size.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from laconic.layout.bucket import BucketLayout, Slot

SHARD_ALIGNMENT_BYTES = 16
"""Shards start on 16-byte borders. Other borders put NCCL on a slow path (pytorch #195450, NCCL #413)."""
NEGLIGIBLE = 0.005
"""The share of a unit that a plan may pad to start tensors on 16 bytes, keep default rows, or save a collective."""
_FINE, _FINEST = 11, 20
"""The least steps between shard sizes: 2 ** -11 of the size, and 2 ** -20 for multiples of d."""

Tensors = tuple[tuple[int, int], ...]
"""(numel, block) of each tensor, in order. A plan depends on nothing else."""


class Packing(NamedTuple):
    """The elements of every shard, and each tensor's offset in the bucket."""

    shard_numel: int
    offsets: tuple[int, ...]


def plan_bucket(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], *, num_shards: int, itemsize: int
) -> BucketLayout:
    """Place tensors, in order, in a bucket with the smallest feasible shards. Arguments and errors: see `plan_unit`."""
    packing = pack(packed_tensors(names, shapes, blocks), num_shards, quantum_of(itemsize))
    assert packing is not None  # a single shard can hold all tensors
    slots = tuple(
        Slot(name=name, shape=tuple(shape), block=block, offset=offset)
        for name, shape, block, offset in zip(names, shapes, blocks, packing.offsets, strict=True)
    )
    return BucketLayout(slots=slots, num_shards=num_shards, shard_numel=packing.shard_numel)


def packed_tensors(names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int]) -> Tensors:
    """Reduce tensors to (numel, block). Arguments and errors: see `plan_bucket`."""
    for name, block in zip(names, blocks, strict=True):
        if block < 1:
            raise ValueError(f"{name}: a block needs at least one element, got {block}")
    return tuple((math.prod(shape), block) for shape, block in zip(shapes, blocks, strict=True))


def quantum_of(itemsize: int) -> int:
    """The number of elements of `itemsize` bytes in 16 bytes. Every shard size is a multiple of this number."""
    return max(1, SHARD_ALIGNMENT_BYTES // itemsize)


def least_shard(numel: int, num_shards: int, quantum: int) -> int:
    """The elements of a shard if `numel` elements could be cut anywhere: a multiple of `quantum`, and not zero."""
    return round_up(max(-(-numel // num_shards), 1), quantum)


@lru_cache(maxsize=1024)  # the layers of a model share one plan
def pack(tensors: Tensors, num_shards: int, quantum: int, limit: int | None = None) -> Packing | None:
    """Pack tensors, in order, into shards of the smallest feasible size; None if that is above `limit`.

    Tensors start on multiples of `quantum` too (16 bytes: vector loads, grouped matrix products), unless this would
    take more than 0.5 % more. With these starts, the result may exceed `limit`.
    """
    shard_numel = smallest_shard(tensors, num_shards, quantum, limit=limit)
    if shard_numel is None:
        return None
    # A tensor that starts on a multiple of q, as shards do, is placed as roundup(e, q) elements in blocks of lcm(g, q).
    aligned = tuple((round_up(numel, quantum), math.lcm(block, quantum)) for numel, block in tensors)
    bound = int(shard_numel * (1 + NEGLIGIBLE))
    aligned_numel = smallest_shard(aligned, num_shards, quantum, start=shard_numel, limit=bound)
    best, chosen = (shard_numel, tensors) if aligned_numel is None else (aligned_numel, aligned)
    offsets = place(chosen, num_shards, best)
    assert offsets is not None
    return Packing(best, offsets)


def smallest_shard(
    tensors: Tensors, num_shards: int, quantum: int, *, start: int = 0, limit: int | None = None
) -> int | None:
    """The smallest feasible shard size from `start` to `limit`, a multiple of `quantum`; None if there is none."""
    sizes = shard_candidates(tensors, num_shards, quantum, start=start, limit=limit)
    return next((size for size in sizes if place(tensors, num_shards, size) is not None), None)


def shard_candidates(
    tensors: Tensors, num_shards: int, quantum: int, *, start: int = 0, limit: int | None = None
) -> Iterator[int]:
    """The sizes of [Note: Shard sizes to try], ascending, from a lower bound to a shard that holds all tensors."""
    kinds = set(tensors)
    total = sum(numel for numel, _ in tensors)
    top = round_up(max(total, 1), quantum)
    top = top if limit is None else min(top, limit)
    floor = max((min(e, g) for e, g in kinds), default=1)
    size = round_up(max(-(-total // num_shards), floor, start, 1), quantum)
    firm = [math.gcd(e, g) for e, g in kinds if g > quantum and e > size >> _FINE]
    divisor = math.gcd(*firm)
    of_block: Counter[int] = Counter()  # elements in whole blocks, by block size
    for e, g in tensors:
        of_block[g] += e // g * g

    def may_fit(size: int) -> bool:
        return all(num_shards * (size // g * g) >= whole for g, whole in of_block.items()) and all(
            size % g == 0 or size // g * g >= e - size for e, g in kinds if e > size
        )

    while size <= top:
        long = [(e, g) for e, g in kinds if e >= 2 * size]
        step = math.lcm(quantum, *(g for _, g in long))
        last = min([top, *(e // 2 for e, _ in long)])  # the same tensors are long at all sizes up to here
        size = round_up(size, step)
        while size <= last:
            if may_fit(size):
                yield size
            grains = [max(divisor, size >> _FINEST)] if firm else []
            if len(firm) < len(kinds):
                grains.append(max(1, size >> _FINE))
            size = min(round_up((size // grain + 1) * grain, step) for grain in grains)
        size = round_up(last + 1, quantum)


def place(tensors: Sequence[tuple[int, int]], num_shards: int, shard_numel: int) -> tuple[int, ...] | None:
    """Offsets of tensors (numel, block), in order, in a bucket of `num_shards` shards; None if they do not fit."""
    pointer, remaining = 0, sum(numel for numel, _ in tensors)
    offsets = []
    for numel, block in tensors:
        offset = earliest(pointer, numel, block, shard_numel)
        if offset is None or offset + remaining > num_shards * shard_numel:
            return None
        offsets.append(offset)
        pointer = offset + numel
        remaining -= numel
    return tuple(offsets)


def earliest(pointer: int, numel: int, block: int, shard_numel: int) -> int | None:
    """The smallest legal start from `pointer` on: no border cuts a block of the tensor. None if no start is legal.

    Reference: tests/reference/planner.py. Source: [Note: Exact placement for a given order and shard size].
    """
    border = (pointer // shard_numel + 1) * shard_numel  # the first border behind the pointer
    if pointer + numel <= border:
        return pointer
    on_edges = shard_numel % block == 0  # then all borders in the tensor lie on edges if one does
    start = border - (border - pointer) // block * block  # the first start that puts an edge on `border`
    if start < border and (start + numel <= border + shard_numel or on_edges):
        return start
    if numel <= shard_numel or on_edges:
        return border
    shift = shard_numel % block  # a start so far behind `border` puts an edge on the next border
    if shard_numel >= block and shift + numel <= 2 * shard_numel:
        return border + shift
    return None


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
