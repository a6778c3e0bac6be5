"""Which gathers begin with each unit's forward: every number of units ahead is tried, and the largest that may be kept.

Sizes are bytes. `around` are the units that stay gathered while others run, by place in the order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise


def ahead(
    whole_bytes: Sequence[int],
    node_bytes: Sequence[int],
    around: Collection[int],
    *,
    at_home: Collection[int] = (),
    budget_bytes: int | None = None,
) -> list[tuple[list[int], list[int]]]:
    """For each unit, by place, the units that are gathered whole, and those whose first stage begins.

    The node shards of the units `at_home` arrive where they stay.
    """
    places = range(len(whole_bytes))
    inner = [place for place in places if place not in around]
    largest = max((whole_bytes[place] for place in inner), default=0)
    pair = largest
    for one, other in pairwise(inner):
        pair = max(pair, whole_bytes[one] + whole_bytes[other])
    found = []
    for place in places:
        rest = list(places[place + 1 :])
        with_it = largest if place in around else whole_bytes[place]
        room = pair - with_it if budget_bytes is None else budget_bytes
        whole = max(
            (rest[:n] for n in range(len(rest) + 1) if n <= 1 or sum(whole_bytes[i] for i in rest[:n]) <= room), key=len
        )
        after = rest[len(whole) :]
        left = room - sum(whole_bytes[i] for i in whole)
        early = [i for i in after[:1] if i in at_home]
        if budget_bytes is not None:
            fitting = (after[:n] for n in range(len(after) + 1) if sum(node_bytes[i] for i in after[:n]) <= left)
            early = max(fitting, key=len, default=[])
        found.append((whole, early))
    return found
