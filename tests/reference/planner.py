"""The best plans, found by trying everything. Tensors are (numel, block), as in laconic/layout/packing.py."""

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
    """The first legal start from `pointer` on. Legal starts repeat with the shards, so trying two shards is enough."""
    candidates = range(pointer, pointer + 2 * shard_numel)
    return next((start for start in candidates if is_legal(start, numel, block, shard_numel)), None)


def fits(tensors: Sequence[tuple[int, int]], num_shards: int, shard_numel: int) -> bool:
    """True if any placement in the given order fits. This tries every start, not only the earliest."""
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
    """The smallest of `smallest_shard` over all orders of the tensors."""
    return min(smallest_shard(order, num_shards, quantum) for order in set(itertools.permutations(tensors)))


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All partitions of the items."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [items[0], *parts[index]], *parts[index + 1 :]]


def least_numel(tensors: Sequence[tuple[int, int]], num_shards: int, quantum: int) -> int:
    """The elements of all buckets under the best partition and the best orders."""
    return min(
        sum(
            num_shards * smallest_shard_of_any_order([tensors[index] for index in part], num_shards, quantum)
            for part in parts
        )
        for parts in partitions(range(len(tensors)))
    )
