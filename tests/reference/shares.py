"""The cut of a bucket by shares, found by trying every place. Tensors are (numel, block): laconic/layout/packing.py.

See [Note: Unequal shards] in laconic/layout/shares.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def offsets_of(tensors: Sequence[tuple[int, int]], quantum: int) -> list[int]:
    """Where each tensor begins, and where the last one ends: at multiples of `quantum`."""
    found = [0]
    for numel, _ in tensors:
        end = found[-1] + numel
        while end % quantum:
            end += 1
        found.append(end)
    return found


def is_place(border: int, tensors: Sequence[tuple[int, int]], quantum: int) -> bool:
    """True if a border may lie there: a multiple of `quantum` that lies in no block of a tensor."""
    cuts = any(
        offset + first < border < offset + min(first + block, numel)
        for (numel, block), offset in zip(tensors, offsets_of(tensors, quantum), strict=False)
        for first in range(0, numel, block)
    )
    return border % quantum == 0 and not cuts


def stops_of(tensors: Sequence[tuple[int, int]], shares: Sequence[int], quantum: int) -> list[int]:
    """The element at which each shard ends."""
    total, stops = offsets_of(tensors, quantum)[-1], [0]
    places = [each for each in range(total + len(shares) * quantum + 1) if is_place(each, tensors, quantum)]
    for rank in range(1, len(shares)):
        ideal = Fraction(total * sum(shares[:rank]), sum(shares))
        nearest = min(places, key=lambda place: abs(place - ideal))  # the lower of two
        least = stops[-1] + quantum
        stops.append(nearest if nearest >= least else next(place for place in places if place >= least))
    return [*stops[1:], max(total, stops[-1] + quantum)]
