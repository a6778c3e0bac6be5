"""Which documents share a row."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put documents into rows of at most `capacity` tokens by best-fit decreasing.

    The longest document goes first, each into the fullest row that still has room for it. The number of rows is at most
    11/9 of the smallest possible number, plus one. Cost: n log n for n documents, and at most `capacity` kinds of rows.
    The result depends on `lengths` alone. Rows have their documents in the order of the corpus.

    Args:
        lengths: the number of tokens of each document, at most `capacity`.
        capacity: the number of tokens of a row.

    Returns:
        The documents of each row, by their places in `lengths`.

    Source: Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830.
    """
    sizes = np.asarray(lengths)
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # the rows with so many free tokens
    rooms: list[int] = []  # the keys of `by_room`, sorted
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(document)
        left = room - size
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(row)
    return [sorted(row) for row in rows]
