"""Packs a unit's tensors into buckets of equal shards, with little padding, and cuts no block. Pure arithmetic.

[Note: Exact placement for a given order and shard size]
A tensor of e elements with blocks of g elements may start at an offset only if every border between shards inside the
tensor lies on the edge of a block. Whether an offset is legal depends on the offset alone. The order demands only that
a tensor starts where the previous one ends, or later, so an earlier end never leads to a later start. Greedy placement
starts each tensor at its earliest legal offset. It is exact: if any placement in this order fits, the greedy one fits.

Larger shards do not always fit better. A tensor with e = 6 and g = 2 fits on 3 shards of S = 2 or S = 4 elements, but
not of S = 3. So the search tries shard sizes upwards. It skips sizes that a long tensor (e >= 2 S) rules out: two
borders lie S elements apart inside such a tensor, so S must be a multiple of g.
veScale-FSDP (arXiv 2602.22437) states the same problem and solves it by a heuristic.

[Note: Shard sizes to try]
Let d be the greatest common divisor of the sizes of all tensors and blocks. A shard holds whole blocks and ends of
tensors, which is a multiple of d elements. A shard of S elements holds no more than a shard of d * floor(S / d)
elements, so one size for each multiple of d is enough.

Two kinds of tensors would make d tiny, although they hardly change the plan: tensors that may be cut anywhere, and
tensors below 1/2048 of a shard. So the search takes d over the other tensors. Long tensors fit best at multiples of
this d. Beside these multiples, the search tries sizes in steps of 1/2048 of the shard, to fit the two kinds that d
leaves out. Below 2048 elements per shard it tries every size. The search skips a size at which some tensor would not
fit even alone, and a size at which all shards together hold too few whole blocks of some size.

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

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from laconic.layout.bucket import BucketLayout, Slot

SHARD_ALIGNMENT_BYTES = 16
"""Shards start on 16-byte borders. Other borders put NCCL on a slow path (pytorch #195450, NCCL #413)."""
NEGLIGIBLE = 0.005
"""The share of a unit that a plan may pad to start tensors on 16 bytes, keep default rows, or save a collective."""
_FINE, _FINEST = 11, 20
"""The least steps between shard sizes: 2 ** -11 of the size, and 2 ** -20 for multiples of d."""

Tensors = tuple[tuple[int, int], ...]
"""(numel, block) of each tensor, in order. A plan depends on nothing else."""


class Packing(NamedTuple):
    """The elements of every shard, and each tensor's offset in the bucket."""

    shard_numel: int
    offsets: tuple[int, ...]


def plan_bucket(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], *, num_shards: int, itemsize: int
) -> BucketLayout:
    """Place tensors, in order, in a bucket with the smallest feasible shards. Arguments and errors: see `plan_unit`."""
    packing = pack(packed_tensors(names, shapes, blocks), num_shards, quantum_of(itemsize))
    assert packing is not None  # a single shard can hold all tensors
    slots = slots_of(names, shapes, blocks, packing.offsets)
    return BucketLayout(slots=slots, num_shards=num_shards, shard_numel=packing.shard_numel)


def slots_of(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], offsets: Sequence[int]
) -> tuple[Slot, ...]:
    """The places of tensors in a bucket."""
    each = zip(names, map(tuple, shapes), blocks, offsets, strict=True)
    return tuple(Slot(name=name, shape=shape, block=block, offset=offset) for name, shape, block, offset in each)


def packed_tensors(names: Sequence[str], shapes: Sequence[tuple[int, ...]], blocks: Sequence[int]) -> Tensors:
    """Reduce tensors to (numel, block). Arguments and errors: see `plan_bucket`."""
    for name, block in zip(names, blocks, strict=True):
        if block < 1:
            raise ValueError(f"{name}: a block needs at least one element, got {block}")
    return tuple((math.prod(shape), block) for shape, block in zip(shapes, blocks, strict=True))


def quantum_of(itemsize: int) -> int:
    """The number of elements of `itemsize` bytes in 16 bytes. Every shard size is a multiple of this number."""
    return max(1, SHARD_ALIGNMENT_BYTES // itemsize)


def least_shard(numel: int, num_shards: int, quantum: int) -> int:
    """The elements of a shard if `numel` elements could be cut anywhere: a multiple of `quantum`, and not zero."""
    return round_up(max(-(-numel // num_shards), 1), quantum)


@lru_cache(maxsize=1024)  # the layers of a model share one plan
def pack(tensors: Tensors, num_shards: int, quantum: int, limit: int | None = None) -> Packing | None:
    """Pack tensors, in order, into shards of the smallest feasible size; None if that is above `limit`.

    Tensors start on multiples of `quantum` too (16 bytes: vector loads, grouped matrix products), unless this would
    take more than 0.5 % more. With these starts, the result may exceed `limit`.
    """
    shard_numel = smallest_shard(tensors, num_shards, quantum, limit=limit)
    if shard_numel is None:
        return None
    # A tensor that starts on a multiple of q, as shards do, is placed as roundup(e, q) elements in blocks of lcm(g, q).
    aligned = tuple((round_up(numel, quantum), math.lcm(block, quantum)) for numel, block in tensors)
    bound = int(shard_numel * (1 + NEGLIGIBLE))
    aligned_numel = smallest_shard(aligned, num_shards, quantum, start=shard_numel, limit=bound)
    best, chosen = (shard_numel, tensors) if aligned_numel is None else (aligned_numel, aligned)
    offsets = place(chosen, num_shards, best)
    assert offsets is not None
    return Packing(best, offsets)


def smallest_shard(
    tensors: Tensors, num_shards: int, quantum: int, *, start: int = 0, limit: int | None = None
) -> int | None:
    """The smallest feasible shard size from `start` to `limit`, a multiple of `quantum`; None if there is none."""
    sizes = shard_candidates(tensors, num_shards, quantum, start=start, limit=limit)
    return next((size for size in sizes if place(tensors, num_shards, size) is not None), None)


def shard_candidates(
    tensors: Tensors, num_shards: int, quantum: int, *, start: int = 0, limit: int | None = None
) -> Iterator[int]:
    """The sizes of [Note: Shard sizes to try], ascending, from a lower bound to a shard that holds all tensors."""
    kinds = set(tensors)
    total = sum(numel for numel, _ in tensors)
    top = round_up(max(total, 1), quantum)
    top = top if limit is None else min(top, limit)
    floor = max((min(e, g) for e, g in kinds), default=1)
    size = round_up(max(-(-total // num_shards), floor, start, 1), quantum)
    firm = [math.gcd(e, g) for e, g in kinds if g > quantum and e > size >> _FINE]
    divisor = math.gcd(*firm)
    of_block: Counter[int] = Counter()  # elements in whole blocks, by block size
    for e, g in tensors:
        of_block[g] += e // g * g

    def may_fit(size: int) -> bool:
        return all(num_shards * (size // g * g) >= whole for g, whole in of_block.items()) and all(
            size % g == 0 or size // g * g >= e - size for e, g in kinds if e > size
        )

    while size <= top:
        long = [(e, g) for e, g in kinds if e >= 2 * size]
        step = math.lcm(quantum, *(g for _, g in long))
        last = min([top, *(e // 2 for e, _ in long)])  # the same tensors are long at all sizes up to here
        size = round_up(size, step)
        while size <= last:
            if may_fit(size):
                yield size
            grains = [max(divisor, size >> _FINEST)] if firm else []
            if len(firm) < len(kinds):
                grains.append(max(1, size >> _FINE))
            size = min(round_up((size // grain + 1) * grain, step) for grain in grains)
        size = round_up(last + 1, quantum)


def place(tensors: Sequence[tuple[int, int]], num_shards: int, shard_numel: int) -> tuple[int, ...] | None:
    """Offsets of tensors (numel, block), in order, in a bucket of `num_shards` shards; None if they do not fit."""
    pointer, remaining = 0, sum(numel for numel, _ in tensors)
    offsets = []
    for numel, block in tensors:
        offset = earliest(pointer, numel, block, shard_numel)
        if offset is None or offset + remaining > num_shards * shard_numel:
            return None
        offsets.append(offset)
        pointer = offset + numel
        remaining -= numel
    return tuple(offsets)


def earliest(pointer: int, numel: int, block: int, shard_numel: int) -> int | None:
    """The smallest legal start from `pointer` on: no border cuts a block of the tensor. None if no start is legal.

    Reference: tests/reference/planner.py. Source: [Note: Exact placement for a given order and shard size].
    """
    border = (pointer // shard_numel + 1) * shard_numel  # the first border behind the pointer
    if pointer + numel <= border:
        return pointer
    on_edges = shard_numel % block == 0  # then all borders in the tensor lie on edges if one does
    start = border - (border - pointer) // block * block  # the first start that puts an edge on `border`
    if start < border and (start + numel <= border + shard_numel or on_edges):
        return start
    if numel <= shard_numel or on_edges:
        return border
    shift = shard_numel % block  # a start so far behind `border` puts an edge on the next border
    if shard_numel >= block and shift + numel <= 2 * shard_numel:
        return border + shift
    return None


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


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
    tensors = packed_tensors(names, shapes, blocks)
    quantum = quantum_of(itemsize)
    parts = (tuple(range(len(tensors))),) if may_shrink else best_parts(tensors, num_shards, quantum)
    if may_shrink and _is_costly(tensors, num_shards, quantum):
        blocks = [1] * len(tensors)
    buckets = []
    for part in parts:
        own = ([every[index] for index in part] for every in (names, shapes, blocks))
        buckets.append(plan_bucket(*own, num_shards=num_shards, itemsize=itemsize))  # type: ignore[arg-type]
    return UnitPlan(buckets=tuple(buckets), members=parts)


def warn_if_wasteful(plan: UnitPlan, itemsize: int) -> None:
    """Warn if blocks make the plan more than twice as large as its tensors, at `itemsize` bytes per element."""
    num_shards = plan.buckets[0].num_shards
    quantum = quantum_of(itemsize)
    least = num_shards * sum(least_shard(bucket.numel - bucket.padding, num_shards, quantum) for bucket in plan.buckets)
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
    least = num_shards * least_shard(sum(numel for numel, _ in tensors), num_shards, quantum)
    return pack(tensors, num_shards, quantum, int(least * (1 + NEGLIGIBLE)) // num_shards) is None


@lru_cache(maxsize=256)  # the layers of a model share one plan
def best_parts(tensors: Tensors, num_shards: int, quantum: int) -> tuple[Members, ...]:
    """Find the cheapest partition: for each bucket its tensors, in the order in which to place them.

    Reference: tests/reference/planner.py. Source: [Note: Where padding comes from, and why buckets help].
    """
    total = sum(numel for numel, _ in tensors)
    best: tuple[Members, ...] = (tuple(range(len(tensors))),)
    one = pack(tensors, num_shards, quantum)
    assert one is not None
    cost = num_shards * one.shard_numel
    if cost - total <= NEGLIGIBLE * total or one.shard_numel == quantum:
        return best
    price = int(_COLLECTIVE * total)
    partitions = [
        tuple(tuple(sorted(chain.from_iterable(part))) for part in parts)
        for parts in _partitions(_classes(tensors, quantum), MAX_BUCKETS)
    ]
    # the smallest shard of each part: a lower bound of it, until its best order is known
    shards: dict[Members, int] = {}
    for part in {part for parts in partitions for part in parts}:
        shards[part] = next(shard_candidates(_select(tensors, part), num_shards, quantum))
    orders: dict[Members, Members] = {}

    def bound(parts: tuple[Members, ...]) -> int:
        return num_shards * sum(shards[part] for part in parts) + price * (len(parts) - 1)

    for parts in sorted(partitions, key=lambda parts: (bound(parts), len(parts))):
        for part in parts:
            if part not in orders and bound(parts) < cost:
                shards[part], orders[part] = _best_order(tensors, part, num_shards, quantum)
        if bound(parts) < cost:
            best, cost = tuple(orders[part] for part in parts), bound(parts)
    return best


def _best_order(tensors: Tensors, part: Members, num_shards: int, quantum: int) -> tuple[int, Members]:
    """The smallest shard for some of the tensors, and the order in which to place them."""
    best: tuple[int, Members] | None = None
    limit = None
    for key in _ORDERS:
        order = tuple(sorted(part, key=lambda index: key(tensors[index])))
        packed = pack(_select(tensors, order), num_shards, quantum, limit)
        if packed is not None and (limit is None or packed.shard_numel <= limit):
            best = packed.shard_numel, order
            limit = packed.shard_numel - 1 - (packed.shard_numel >> _WORTHWHILE)
    assert best is not None
    return best


def _select(tensors: Tensors, members: Members) -> Tensors:
    return tuple(tensors[index] for index in members)


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
