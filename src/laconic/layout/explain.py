"""Explains why a plan pads: which tensors decide the size of the shards, and by which rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from laconic.layout.bucket import BucketLayout, Slot
from laconic.layout.packing import SHARD_ALIGNMENT_BYTES, UnitPlan, least_shard, quantum_of, round_up

_MAX_SHOWN = 4  # names of tensors in a message


class Cause(StrEnum):
    """The rule that decides the size of a bucket's shards."""

    ALIGNMENT = "alignment"
    """A rank's even share of the tensors, rounded up to 16 bytes."""
    FLOOR = "floor"
    """One block must fit into a shard."""
    MULTIPLE = "multiple"
    """Long tensors, of two shards or more, need shards that are a multiple of their blocks."""
    GAPS = "gaps"
    """Whole blocks do not end on the borders between shards, and leave gaps before them."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reason why a bucket is larger than its tensors."""

    cause: Cause
    tensors: tuple[str, ...]
    """The names of the tensors that decide, the largest first."""
    block: int
    """By cause: the elements of the alignment, the block that must fit, the common multiple, or the largest gap;
    0 if all padding is behind the last tensor."""
    numel: int
    num_shards: int
    shard_numel: int
    least_shard_numel: int
    """The elements that a shard would have if tensors could be cut anywhere."""

    @property
    def padding(self) -> int:
        """The number of elements that belong to no tensor."""
        return self.num_shards * self.shard_numel - self.numel

    def __str__(self) -> str:
        share = self.padding / self.numel if self.numel else 0.0
        num_hidden = len(self.tensors) - _MAX_SHOWN
        names = ", ".join(self.tensors[:_MAX_SHOWN]) + (f" and {num_hidden} more" if num_hidden > 0 else "")
        even = self.least_shard_numel
        match self.cause:
            case Cause.ALIGNMENT:
                reason = f"only what {SHARD_ALIGNMENT_BYTES}-byte borders need"
            case Cause.FLOOR:
                reason = f"a block of {names} has {self.block:,} elements, an even share only {even:,}"
            case Cause.MULTIPLE:
                reason = (
                    f"tensors over two shards or more ({names}) make shards multiples of {self.block:,}, the least "
                    f"common multiple of their blocks; an even share is {even / self.block:.2f} of that"
                )
            case Cause.GAPS if not self.block:
                reason = f"whole blocks of {names} do not fill the shards evenly, and what is left is at the end"
            case Cause.GAPS:
                reason = f"whole blocks of {names} leave gaps before borders, the largest of {self.block:,} elements"
        sizes = f"{self.num_shards} shards of {self.shard_numel:,} for {self.numel:,} elements"
        return f"{share:.2%} padding: {sizes}; {reason}"


def explain(plan: UnitPlan, *, itemsize: int) -> tuple[Explanation, ...]:
    """Explain the size of each bucket of a plan; `itemsize` is the argument of `plan_unit`.

    A floor or a least common multiple proves that no layout in one bucket has smaller shards. Gaps depend on the order.
    """
    return tuple(_explained(bucket, quantum_of(itemsize)) for bucket in plan.buckets)


def _explained(layout: BucketLayout, quantum: int) -> Explanation:
    numel = layout.numel - layout.padding
    least = least_shard(numel, layout.num_shards, quantum)
    cause, slots, block = _cause(layout, least, quantum)
    return Explanation(
        cause=cause,
        tensors=tuple(slot.name for slot in sorted(slots, key=lambda slot: -slot.numel)),
        block=block,
        numel=numel,
        num_shards=layout.num_shards,
        shard_numel=layout.shard_numel,
        least_shard_numel=least,
    )


def _cause(layout: BucketLayout, least: int, quantum: int) -> tuple[Cause, Sequence[Slot], int]:
    """The cause, the tensors that decide, and `Explanation.block`."""
    size = layout.shard_numel
    if size == least:
        return Cause.ALIGNMENT, (), quantum
    floor = max(min(slot.block, slot.numel) for slot in layout.slots)
    if size == round_up(floor, quantum):
        return Cause.FLOOR, [slot for slot in layout.slots if min(slot.block, slot.numel) == floor], floor
    # A tensor of two shards of this size has two smaller shards too, so smaller sizes must be multiples as well.
    long = [slot for slot in layout.slots if slot.numel >= 2 * size and slot.block > 1]
    multiple = lcm(*(slot.block for slot in long))
    if size - multiple < max(least, floor) and size % multiple == 0:
        forcing = [
            slot for slot in long if lcm(*(other.block for other in long if other.block != slot.block)) < multiple
        ]
        return Cause.MULTIPLE, forcing or long, multiple
    gaps = list(_gaps(layout))
    largest = max((gap for _, gap in gaps), default=0)
    return Cause.GAPS, [slot for slot, gap in gaps if 2 * gap >= largest] or layout.slots[:1], largest


def _gaps(layout: BucketLayout) -> Iterator[tuple[Slot, int]]:
    """Each tensor that starts behind a gap, and the elements of the gap."""
    end = 0
    for slot in layout.slots:
        if slot.offset > end:
            yield slot, slot.offset - end
        end = slot.offset + slot.numel
