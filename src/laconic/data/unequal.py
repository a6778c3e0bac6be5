"""How many rows each rank gets, if ranks take different times for a row: [Note: Unequal rows] in batches.py."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def fastest_rows(seconds: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """Divide `num_rows` rows over ranks so that the last rank ends as early as possible. Each gets at least one.

    Each further row goes to the rank that would have it done first; of several, to the first rank. No other division
    ends earlier. Reference: tests/reference/unequal.py.

    Args:
        seconds: the seconds that each rank takes for a row, above 0.
        num_rows: the rows of a step, at least as many as there are ranks.
    """
    rows = [1] * len(seconds)
    ends = [(2 * each, rank) for rank, each in enumerate(seconds)]  # of each rank, if it gets one more row
    heapq.heapify(ends)
    for _ in range(num_rows - len(seconds)):
        _, rank = ends[0]
        rows[rank] += 1
        heapq.heapreplace(ends, ((rows[rank] + 1) * seconds[rank], rank))
    return tuple(rows)


def last_end(rows: Sequence[int], seconds: Sequence[float]) -> float:
    """The seconds after which the last rank has done its rows, if it waits for nobody."""
    return max(number * each for number, each in zip(rows, seconds, strict=True))
