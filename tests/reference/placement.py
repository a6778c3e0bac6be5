"""The best placements of some units, by trying all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from laconic.shard.placement import Saving


def most_seconds(options: Sequence[Sequence[Saving]], device_bytes: int, host_bytes: int) -> float | None:
    """The most seconds that one option of each unit save together within the bytes; None if nothing fits."""
    sums = ([sum(values) for values in zip(*chosen, strict=True)] for chosen in product(*options))
    fitting = [total for total in sums if not total or (total[1] <= device_bytes and total[2] <= host_bytes)]
    return max((total[0] if total else 0.0 for total in fitting), default=None)
