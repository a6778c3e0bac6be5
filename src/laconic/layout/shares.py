"""Cuts a unit's tensors in proportion to the memory of ranks, and cuts no block. Pure arithmetic.

[Note: Unequal shards]
Where ranks have shares of their own, shards need not be equal, so a border may lie wherever blocks allow. Tensors
follow each other, each from a multiple of 16 bytes on. A border's ideal place divides their elements as the shares say.
The border goes to the nearest multiple of 16 bytes that cuts no block: the edge of a block, or the end of a tensor. So
a shard differs from its share by one block at most, and no size has to be a multiple of many blocks, as those of equal
shards must: [Note: Where padding comes from, and why buckets help] in packing.py. One bucket is enough.

Every shard has 16 bytes at least, as an equal one does. Where blocks are so large, or tensors so small, that two
borders meet in one place, the later one takes the next place that is free, also behind the tensors, as padding.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import NEGLIGIBLE, Tensors, UnitPlan, packed_tensors, quantum_of, round_up, slots_of

Shares = tuple[float, ...]
"""A positive number for each shard, of which only the ratio counts."""
_MOST_OVER = 2.0
"""A rank that holds more than so many times its share is worth a warning."""


def plan_by_shares(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    blocks: Sequence[int],
    *,
    shares: Shares,
    itemsize: int,
    may_shrink: bool = False,
) -> UnitPlan:
    """Place a unit's tensors, in the order of definition, in one bucket whose shards are as large as `shares` say.

    Arguments and errors: see `plan_unit`. `may_shrink` lets blocks shrink to single elements where, for its share, the
    fullest rank would hold 0.5 % more with them.

    Reference: tests/reference/shares.py. Source: [Note: Unequal shards].
    """
    quantum = quantum_of(itemsize)
    tensors, free = packed_tensors(names, shapes, blocks), packed_tensors(names, shapes, [1] * len(names))
    offsets, stops = cut_by_shares(tensors, shares, quantum)
    if may_shrink:
        without_blocks = cut_by_shares(free, shares, quantum)
        if fullness(stops, shares) > (1 + NEGLIGIBLE) * fullness(without_blocks[1], shares):
            blocks, (offsets, stops) = [1] * len(names), without_blocks
    slots = slots_of(names, shapes, blocks, offsets)
    largest = max(stop - start for start, stop in pairwise((0, *stops)))
    layout = BucketLayout(slots=slots, num_shards=len(stops), shard_numel=largest, stops=stops)
    return UnitPlan(buckets=(layout,), members=(tuple(range(len(names))),))


@lru_cache(maxsize=1024)  # the layers of a model share one plan
def cut_by_shares(tensors: Tensors, shares: Shares, quantum: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offset of each tensor in the bucket, and the element at which each shard ends: [Note: Unequal shards]."""
    places = _Places(tensors, quantum)
    whole, stops = sum(map(Fraction, shares)), [0]
    for part in list(accumulate(map(Fraction, shares)))[:-1]:
        ideal = places.total * part / whole
        below, above = places.before(math.floor(ideal)), places.behind(math.ceil(ideal))
        nearest = below if ideal - below <= above - ideal else above
        least = stops[-1] + quantum
        stops.append(nearest if nearest >= least else places.behind(least))
    return places.offsets, (*stops[1:], max(places.total, stops[-1] + quantum))


class _Places:
    """The places in a bucket where a border cuts no block: [Note: Unequal shards]."""

    def __init__(self, tensors: Tensors, quantum: int) -> None:
        self._tensors, self._quantum = tensors, quantum
        *offsets, self.total = accumulate((round_up(numel, quantum) for numel, _ in tensors), initial=0)
        self.offsets = tuple(offsets)

    def before(self, element: int) -> int:
        """The last place that is not behind `element`."""
        if element >= self.total:
            return element - (element - self.total) % self._quantum
        offset, numel, step = self._at(element)
        return offset + min(element - offset, numel) // step * step

    def behind(self, element: int) -> int:
        """The first place that is not before `element`."""
        found = self.before(element)
        if found == element:
            return found
        if element >= self.total:
            return found + self._quantum
        offset, numel, step = self._at(element)
        return found + step if found + step <= offset + numel else offset + round_up(numel, self._quantum)

    def _at(self, element: int) -> tuple[int, int, int]:
        """The tensor in which an element lies, or behind whose end: its offset, its numel, the step of its places."""
        index = bisect_right(self.offsets, element) - 1
        numel, block = self._tensors[index]
        return self.offsets[index], numel, math.lcm(block, self._quantum)


def warn_if_uneven(plan: UnitPlan, shares: Shares, itemsize: int) -> None:
    """Warn if blocks make a rank hold more than twice its share of the plan, at `itemsize` bytes per element."""
    for layout in plan.buckets:
        tensors = tuple((slot.numel, 1) for slot in layout.slots)
        over = fullness(layout.stops, shares) / fullness(
            cut_by_shares(tensors, shares, quantum_of(itemsize))[1], shares
        )
        if over > _MOST_OVER:
            slot = max(layout.slots, key=lambda slot: slot.block)
            warnings.warn(
                f"the blocks that granularity asks for make a rank hold {over:.1f}x its share of the unit of "
                f"{slot.name}, whose largest block has {slot.block:,} elements ({tuple(slot.shape)}): ask for smaller "
                "blocks, or for shares that differ less",
                stacklevel=2,
            )


def fullness(stops: Sequence[int], shares: Shares) -> float:
    """The elements that the shards would have together if, for its share, each were as full as the fullest."""
    sizes = (stop - start for start, stop in pairwise((0, *stops)))
    return max(size / share for size, share in zip(sizes, shares, strict=True)) * sum(shares)
