"""Splits a unit's tensors into buckets and orders each, so that least is padded. A pure function of shapes and blocks.

[Note: Where padding comes from, and why buckets help]
A tensor of two shards or more has borders one shard apart inside it, so the shard must be a multiple of its block. Two
such tensors with rows of different lengths ask for the least common multiple of both, and a unit may be padded to twice
its size on the way to the next multiple. In buckets of their own each asks for its own rows only. But a bucket is a
collective more, and other borders cut other tensors. So all partitions into at most `MAX_BUCKETS` buckets are compared,
keeping tensors of like block and weight together and each bucket in several orders, by

    padded elements + 0.25 % of the unit for each bucket after the first,

lower bounds first, so that few are ever packed. A unit whose tensors fit one bucket in the order in which they are
defined, padded by 0.5 % or less, stays one: that is almost every unit whose blocks are rows.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import NEGLIGIBLE, Tensors, pack, plan_bucket, quantum_of, round_up, shard_candidates

MAX_BUCKETS = 4
"""Of one kind (dtype, trainability) in a unit."""
_MAX_CLASSES = 6
"""Sets of tensors that are kept together: 187 partitions. The smallest of a unit with more go with each other."""
_COLLECTIVE = 0.0025
"""What a bucket more must save, of the unit's elements."""
_LIGHT = 0.05
"""Of a unit: equal tensors that are less than this together are light."""

_WORTHWHILE = 11
"""Another order must save 2 ** -11 of a shard to be looked for."""

ORDERS: dict[str, Callable[[tuple[int, int]], int]] = {
    "block, descending": lambda tensor: -tensor[1],
    "block, ascending": lambda tensor: tensor[1],
    "size, descending": lambda tensor: -tensor[0],
    "definition": lambda tensor: 0,
}
"""Sort keys of (numel, block); what is equal keeps the order of definition. The first is best most often."""

Members = tuple[int, ...]
"""Indices of a unit's tensors."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A unit's tensors in one bucket or several."""

    buckets: tuple[BucketLayout, ...]
    members: tuple[Members, ...]
    """For each bucket, which of the unit's tensors are in it, in the order of its slots."""

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return sum(bucket.padding for bucket in self.buckets)

    @cached_property
    def padding_share(self) -> float:
        """Of the tensors' own elements, what is added to them."""
        own = self.numel - self.padding
        return self.padding / own if own else 0.0


def plan_unit(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    blocks: Sequence[int],
    *,
    num_shards: int,
    itemsize: int,
    may_shrink: bool = False,
) -> UnitPlan:
    """Place a unit's tensors of one kind, in one bucket or several.

    Args:
        names, shapes, blocks: one entry per tensor, in the order of definition; blocks in elements.
        num_shards: N x L, the ranks that share the unit.
        itemsize: bytes of the smallest dtype the buckets will be stored or sent in.
        may_shrink: nobody asked for these blocks: give them up, tensors may be cut anywhere, if they cost more than
            0.5 % of the unit. Then there is one bucket, in the order of definition.

    Raises:
        ValueError: a block of zero elements.
    """
    tensors = tuple((math.prod(shape), block) for shape, block in zip(shapes, blocks, strict=True))
    quantum = quantum_of(itemsize)
    everything = tuple(range(len(tensors)))
    parts: tuple[Members, ...]
    if any(block < 1 for block in blocks):
        parts = (everything,)  # refused below, by name
    elif may_shrink:
        parts = (everything,)
        if _is_costly(tensors, num_shards, quantum):
            blocks = [1] * len(tensors)
    else:
        parts = best_parts(tensors, num_shards, quantum)
    buckets = tuple(
        plan_bucket(
            [names[index] for index in part],
            [shapes[index] for index in part],
            [blocks[index] for index in part],
            num_shards=num_shards,
            itemsize=itemsize,
        )
        for part in parts
    )
    return UnitPlan(buckets=buckets, members=parts)


def warn_if_wasteful(plan: UnitPlan, itemsize: int) -> None:
    """Warn if blocks make the plan take more than twice what its tensors need, `itemsize` bytes per element."""
    num_shards = plan.buckets[0].num_shards
    quantum = quantum_of(itemsize)
    least = sum(least_numel(bucket.numel - bucket.padding, num_shards, quantum) for bucket in plan.buckets)
    if plan.numel > 2 * least:
        slot = max((slot for bucket in plan.buckets for slot in bucket.slots), key=lambda slot: slot.block)
        warnings.warn(
            f"the blocks that granularity asks for make the unit of {slot.name} take {plan.numel / least:.1f}x the "
            f"memory of its tensors on {num_shards} ranks: {plan.numel * itemsize:,} bytes for {least * itemsize:,}. "
            f"Its largest block has {slot.block:,} elements ({slot.name}, {tuple(slot.shape)}), a rank's share of the "
            f"tensors is {least // num_shards:,}. Shard over fewer ranks, or ask for smaller blocks",
            stacklevel=2,
        )


def least_numel(total: int, num_shards: int, quantum: int) -> int:
    """Elements of a bucket that may cut its tensors anywhere."""
    return num_shards * round_up(max(-(-total // num_shards), 1), quantum)


def _is_costly(tensors: Tensors, num_shards: int, quantum: int) -> bool:
    """Whether whole blocks take more than 0.5 % over what tensors that may be cut anywhere take."""
    least = least_numel(sum(numel for numel, _ in tensors), num_shards, quantum)
    return pack(tensors, num_shards, quantum, int(least * (1 + NEGLIGIBLE)) // num_shards) is None


@lru_cache(maxsize=256)  # the layers of a model share one plan
def best_parts(tensors: Tensors, num_shards: int, quantum: int) -> tuple[Members, ...]:
    """The cheapest partition found, the tensors of each part in the order to place them.

    Reference: tests/reference/planner.py. Source: [Note: Where padding comes from, and why buckets help].
    """
    total = sum(numel for numel, _ in tensors)
    everything = tuple(range(len(tensors)))
    one = pack(tensors, num_shards, quantum)
    assert one is not None
    cost = num_shards * one.shard_numel
    if cost - total <= NEGLIGIBLE * total or one.shard_numel == quantum:
        return (everything,)
    best: tuple[Members, ...] = (everything,)
    price = int(_COLLECTIVE * total)
    search = _Search(tensors, num_shards, quantum)
    classes = _classes(tensors, quantum)
    partitions = [
        tuple(tuple(sorted(itertools.chain.from_iterable(part))) for part in parts)
        for parts in _partitions(classes, MAX_BUCKETS)
    ]
    for parts in sorted(partitions, key=lambda parts: (search.bound(parts) + price * len(parts), len(parts))):
        budget = cost - price * (len(parts) - 1)
        found = search.within(parts, budget - 1)
        if found is not None:
            best, numel = found
            cost = numel + price * (len(parts) - 1)
    return best


class _Search:
    """Packs sets of tensors, each once, and no further than it could matter."""

    def __init__(self, tensors: Tensors, num_shards: int, quantum: int) -> None:
        self.tensors, self.num_shards, self.quantum = tensors, num_shards, quantum
        self._least: dict[Members, int] = {}  # no smaller shard is possible
        self._packed: dict[Members, tuple[int, Members]] = {}  # the smallest shard, and the order that has it

    def least(self, members: Members) -> int:
        """A lower bound of the shard size of these tensors."""
        if members not in self._least:
            tensors = tuple(self.tensors[index] for index in members)
            self._least[members] = next(shard_candidates(tensors, self.num_shards, self.quantum))
        return self._least[members]

    def bound(self, parts: tuple[Members, ...]) -> int:
        """A lower bound of all buckets' elements."""
        return self.num_shards * sum(self.least(part) for part in parts)

    def within(self, parts: tuple[Members, ...], limit: int) -> tuple[tuple[Members, ...], int] | None:
        """These parts, ordered, and their buckets' elements, if those are `limit` or fewer."""
        for part in parts:
            rest = sum(self.least(other) for other in parts if other is not part)
            if not self._pack(part, limit // self.num_shards - rest):
                return None
        return tuple(self._packed[part][1] for part in parts), self.bound(parts)

    def _pack(self, members: Members, limit: int) -> bool:
        """Find the smallest shard of any order, if it is `limit` or less; either way the lower bound becomes true."""
        if self.least(members) > limit:
            return False
        if members in self._packed:
            return True
        for key in ORDERS.values():
            order = tuple(sorted(members, key=lambda index: key(self.tensors[index])))
            packing = pack(tuple(self.tensors[index] for index in order), self.num_shards, self.quantum, limit)
            if packing is not None and packing.shard_numel <= limit:
                self._packed[members] = packing.shard_numel, order
                if packing.shard_numel == self.least(members):
                    break
                limit = packing.shard_numel - 1 - (packing.shard_numel >> _WORTHWHILE)
        if members not in self._packed:
            self._least[members] = limit + 1
            return False
        self._least[members] = self._packed[members][0]
        return True


def _classes(tensors: Tensors, quantum: int) -> list[Members]:
    """What is never parted: tensors of one block size, heavy and light ones apart, largest first.

    Light ones are short, so they fit into buckets whose shard is no multiple of their block; those that can be cut
    anywhere go with the largest class.
    """
    total = sum(numel for numel, _ in tensors)
    weights: Counter[tuple[int, int]] = Counter()
    for numel, block in tensors:
        weights[numel, block] += numel
    classes: dict[tuple[int, bool], list[int]] = {}
    loose = []
    for index, (numel, block) in enumerate(tensors):
        if block <= quantum:
            loose.append(index)
        else:
            classes.setdefault((block, weights[numel, block] < _LIGHT * total), []).append(index)
    ordered = sorted(classes.values(), key=lambda members: -sum(tensors[index][0] for index in members))
    largest, *others = ordered or [[]]
    kept, rest = others[: _MAX_CLASSES - 1], others[_MAX_CLASSES - 1 :]
    if rest:
        kept[-1] = [*kept[-1], *itertools.chain.from_iterable(rest)]
    return [tuple(members) for members in ([*largest, *loose], *kept)]


def _partitions(items: Sequence[Members], most: int) -> Iterator[tuple[tuple[Members, ...], ...]]:
    """All partitions of `items` into at most `most` parts."""
    if not items:
        yield ()
        return
    *others, last = items
    for parts in _partitions(others, most):
        for index, part in enumerate(parts):
            yield (*parts[:index], (*part, last), *parts[index + 1 :])
        if len(parts) < most:
            yield (*parts, (last,))
