"""Splits a unit's tensors into buckets and orders each, for little padding. A pure function of shapes and blocks.

[Note: Where padding comes from, and why buckets help]
A tensor of two shards or more contains borders one shard apart, so the shard must be a multiple of the tensor's block.
For two such tensors with rows of different lengths, the shard must be a common multiple of both, and rounding up to the
next one may double the unit. In a bucket of its own, each tensor needs multiples of its own rows only. But every
further bucket costs a collective, and moves the borders to other places in the tensors. So the planner compares
partitions of the tensors into at most `MAX_BUCKETS` buckets, with several orders of each bucket. The cost is the padded
elements, plus 0.25 % of the unit's elements for each bucket after the first. Tensors of equal block and similar weight
stay together. The partitions with the smallest lower bounds come first, so few of them are ever packed. A unit stays in
one bucket, in the order of definition, if that pads 0.5 % or less. Almost every unit whose blocks are rows does.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from laconic.layout import packing
from laconic.layout.bucket import BucketLayout
from laconic.layout.packing import NEGLIGIBLE, Tensors, plan_bucket, quantum_of

MAX_BUCKETS = 4
"""The most buckets for a unit's tensors of one dtype and trainability."""
_MAX_CLASSES = 6
"""The most sets of tensors that stay together; they have 187 partitions. Further, smaller sets join the last."""
_COLLECTIVE = 0.0025
"""The share of the unit's elements that a further bucket must save."""
_LIGHT = 0.05
"""Tensors of one size and block are light if all of them together are below this share of the unit's elements."""
_WORTHWHILE = 11
"""The search looks for another order only if it can save 2 ** -11 of a shard."""

_ORDERS: tuple[Callable[[tuple[int, int]], int], ...] = (
    lambda tensor: -tensor[1],  # the largest block first: the best order most of the time
    lambda tensor: tensor[1],
    lambda tensor: -tensor[0],
    lambda tensor: 0,  # the order of definition
)
"""The orders to try, as sort keys of (numel, block). Equal tensors keep the order of definition."""

Members = tuple[int, ...]
"""Indices of a unit's tensors."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A unit's tensors in one bucket or several."""

    buckets: tuple[BucketLayout, ...]
    members: tuple[Members, ...]
    """For each bucket, the unit's tensors in it, in the order of its slots."""

    @property
    def numel(self) -> int:
        """The number of elements of all buckets, with padding."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """The number of elements that belong to no tensor."""
        return sum(bucket.padding for bucket in self.buckets)


def plan_unit(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    blocks: Sequence[int],
    *,
    num_shards: int,
    itemsize: int,
    may_shrink: bool = False,
) -> UnitPlan:
    """Place a unit's tensors of one dtype and trainability, in the order of definition, in one bucket or several.

    Args:
        names: one name per tensor.
        shapes: the tensors' global shapes.
        blocks: the elements per block of each tensor.
        num_shards: N x L, the ranks that share the unit.
        itemsize: bytes of the smallest dtype in which the buckets are stored or sent.
        may_shrink: True if the user did not ask for these blocks. There is then one bucket, in the order of definition.
            Where whole blocks would cost more than 0.5 % of the unit, they shrink to single elements.

    Raises:
        ValueError: a block has no element.
    """
    tensors = packing.packed_tensors(names, shapes, blocks)
    quantum = quantum_of(itemsize)
    parts = (tuple(range(len(tensors))),) if may_shrink else best_parts(tensors, num_shards, quantum)
    if may_shrink and _is_costly(tensors, num_shards, quantum):
        blocks = [1] * len(tensors)
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
    """Warn if blocks make the plan more than twice as large as its tensors, at `itemsize` bytes per element."""
    num_shards = plan.buckets[0].num_shards
    quantum = quantum_of(itemsize)
    least = num_shards * sum(
        packing.least_shard(bucket.numel - bucket.padding, num_shards, quantum) for bucket in plan.buckets
    )
    if plan.numel > 2 * least:
        slot = max((slot for bucket in plan.buckets for slot in bucket.slots), key=lambda slot: slot.block)
        warnings.warn(
            f"the blocks that granularity asks for make the unit of {slot.name} take {plan.numel / least:.1f}x the "
            f"memory of its tensors on {num_shards} ranks: {plan.numel * itemsize:,} bytes for {least * itemsize:,}. "
            f"Its largest block has {slot.block:,} elements ({slot.name}, {tuple(slot.shape)}), a rank's share of the "
            f"tensors is {least // num_shards:,}. Shard over fewer ranks, or ask for smaller blocks",
            stacklevel=2,
        )


def _is_costly(tensors: Tensors, num_shards: int, quantum: int) -> bool:
    """True if whole blocks need over 0.5 % more elements than tensors that may be cut anywhere."""
    least = num_shards * packing.least_shard(sum(numel for numel, _ in tensors), num_shards, quantum)
    return packing.pack(tensors, num_shards, quantum, int(least * (1 + NEGLIGIBLE)) // num_shards) is None


@lru_cache(maxsize=256)  # the layers of a model share one plan
def best_parts(tensors: Tensors, num_shards: int, quantum: int) -> tuple[Members, ...]:
    """Find the cheapest partition: for each bucket its tensors, in the order in which to place them.

    Reference: tests/reference/planner.py. Source: [Note: Where padding comes from, and why buckets help].
    """
    total = sum(numel for numel, _ in tensors)
    best: tuple[Members, ...] = (tuple(range(len(tensors))),)
    one = packing.pack(tensors, num_shards, quantum)
    assert one is not None
    cost = num_shards * one.shard_numel
    if cost - total <= NEGLIGIBLE * total or one.shard_numel == quantum:
        return best
    price = int(_COLLECTIVE * total)
    search = _Search(tensors, num_shards, quantum)
    partitions = [
        tuple(tuple(sorted(chain.from_iterable(part))) for part in parts)
        for parts in _partitions(_classes(tensors, quantum), MAX_BUCKETS)
    ]
    for parts in sorted(partitions, key=lambda parts: (search.bound(parts) + price * len(parts), len(parts))):
        surcharge = price * (len(parts) - 1)
        ordered = search.order(parts, limit=cost - surcharge - 1)
        if ordered is not None:
            best, cost = ordered, search.bound(parts) + surcharge
    return best


class _Search:
    """Packs sets of tensors, each set once, and only as far as it can matter."""

    def __init__(self, tensors: Tensors, num_shards: int, quantum: int) -> None:
        self._tensors, self._num_shards, self._quantum = tensors, num_shards, quantum
        self._least: dict[Members, int] = {}  # a lower bound of the shard size
        self._ordered: dict[Members, Members] = {}  # the best order, once it is known; `_least` is then exact

    def bound(self, parts: tuple[Members, ...]) -> int:
        """A lower bound of the elements of all buckets; exact after `order`."""
        return self._num_shards * sum(self._least_shard(part) for part in parts)

    def order(self, parts: tuple[Members, ...], limit: int) -> tuple[Members, ...] | None:
        """The parts, each in its best order, if all buckets together have `limit` elements or fewer."""
        for part in parts:
            rest = sum(self._least_shard(other) for other in parts if other is not part)
            if not self._pack(part, limit // self._num_shards - rest):
                return None
        return tuple(self._ordered[part] for part in parts)

    def _select(self, members: Members) -> Tensors:
        return tuple(self._tensors[index] for index in members)

    def _least_shard(self, members: Members) -> int:
        if members not in self._least:
            self._least[members] = next(
                packing.shard_candidates(self._select(members), self._num_shards, self._quantum)
            )
        return self._least[members]

    def _pack(self, members: Members, limit: int) -> bool:
        """Find the order with the smallest shard, if that is `limit` or less; otherwise raise the lower bound."""
        if self._least_shard(members) > limit:
            return False
        if members in self._ordered:
            return True
        smallest = limit + 1
        for key in _ORDERS:
            order = tuple(sorted(members, key=lambda index: key(self._tensors[index])))
            packed = packing.pack(self._select(order), self._num_shards, self._quantum, limit)
            if packed is not None and packed.shard_numel <= limit:
                self._ordered[members], smallest = order, packed.shard_numel
                if smallest == self._least[members]:
                    break
                limit = smallest - 1 - (smallest >> _WORTHWHILE)
        self._least[members] = smallest
        return members in self._ordered


def _classes(tensors: Tensors, quantum: int) -> list[Members]:
    """The sets of tensors that stay together, the largest first: tensors of one block size, heavy and light ones apart.

    Light tensors are short, so they fit into buckets whose shard is no multiple of their block. Tensors that may be cut
    anywhere join the largest set.
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
        kept[-1] = [*kept[-1], *chain.from_iterable(rest)]
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
