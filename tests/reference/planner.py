"""What the planner must find, by trying everything. Symbols as in the planner: tensors are (numel, block)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence


def is_legal(start: int, numel: int, block: int, shard_numel: int) -> bool:
    """True if no border of shards that lies strictly inside [start, start + numel) cuts a block."""
    return all(
        (border - start) % block == 0
        for border in range(0, start + numel, shard_numel)
        if start < border < start + numel
    )


def earliest(pointer: int, numel: int, block: int, shard_numel: int) -> int | None:
    """The first legal start >= pointer. Legality repeats with the shards, so one shard's worth of starts settles it."""
    candidates = range(pointer, pointer + 2 * shard_numel)
    return next((start for start in candidates if is_legal(start, numel, block, shard_numel)), None)


def fits(tensors: Sequence[tuple[int, int]], num_shards: int, shard_numel: int) -> bool:
    """True if there is any placement in the given order: every start is tried, not only the earliest."""
    pointers = {0}
    for numel, block in tensors:
        pointers = {
            start + numel
            for pointer in pointers
            for start in range(pointer, num_shards * shard_numel - numel + 1)
            if is_legal(start, numel, block, shard_numel)
        }
    return bool(pointers)


def smallest_shard(tensors: Sequence[tuple[int, int]], num_shards: int, quantum: int) -> int:
    """The smallest multiple of `quantum` that fits, by a linear scan."""
    size = quantum
    while not fits(tensors, num_shards, size):
        size += quantum
    return size


def smallest_shard_of_any_order(tensors: Sequence[tuple[int, int]], num_shards: int, quantum: int) -> int:
    """The same over all orders of the tensors."""
    return min(smallest_shard(order, num_shards, quantum) for order in set(itertools.permutations(tensors)))


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into parts, whatever they are."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [items[0], *parts[index]], *parts[index + 1 :]]


def least_numel(tensors: Sequence[tuple[int, int]], num_shards: int, quantum: int) -> int:
    """Elements of all buckets of the best partition and orders: nothing can be padded less."""
    return min(
        sum(
            num_shards * smallest_shard_of_any_order([tensors[index] for index in part], num_shards, quantum)
            for part in parts
        )
        for parts in partitions(range(len(tensors)))
    )
