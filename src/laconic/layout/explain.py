"""Says why a plan pads: which tensors force the shard size, and by which rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from laconic.layout.bucket import BucketLayout, Slot
from laconic.layout.packing import SHARD_ALIGNMENT_BYTES, quantum_of, round_up
from laconic.layout.planner import UnitPlan


class Cause(StrEnum):
    """What decides the size of a bucket's shards."""

    ALIGNMENT = "alignment"
    """The tensors' own size, rounded up to 16 bytes per rank."""
    FLOOR = "floor"
    """One block must fit into a shard."""
    MULTIPLE = "multiple"
    """Long tensors, of two shards or more, need shards that are a multiple of their blocks."""
    GAPS = "gaps"
    """Tensors that do not end on a border leave gaps before it, as their blocks are not cut."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a bucket takes more than its tensors."""

    cause: Cause
    tensors: tuple[str, ...]
    """Names of those that force it, the largest first."""
    block: int
    """Elements: of the block that must fit, the least common multiple, or the largest gap."""
    numel: int
    """Elements of the tensors alone."""
    num_shards: int
    shard_numel: int
    least_shard_numel: int
    """What a shard would be if tensors could be cut anywhere."""

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.num_shards * self.shard_numel - self.numel

    def __str__(self) -> str:
        share = self.padding / self.numel if self.numel else 0.0
        head = f"{share:.2%} padding: {self.num_shards} shards of {self.shard_numel:,} for {self.numel:,} elements; "
        names = _few(self.tensors)
        if self.cause is Cause.ALIGNMENT:
            return head + f"only what {SHARD_ALIGNMENT_BYTES}-byte borders need"
        if self.cause is Cause.FLOOR:
            return (
                head + f"a block of {names} has {self.block:,} elements, an even share only {self.least_shard_numel:,}"
            )
        if self.cause is Cause.MULTIPLE:
            return head + (
                f"tensors over two shards or more ({names}) make shards multiples of {self.block:,}, the least common "
                f"multiple of their blocks; an even share is {self.least_shard_numel / self.block:.2f} of it"
            )
        return head + f"whole blocks of {names} leave gaps before borders, the largest of {self.block:,} elements"


def explain(plan: UnitPlan, *, itemsize: int) -> tuple[Explanation, ...]:
    """Why each bucket of a plan is as large as it is; `itemsize` as the plan was made with."""
    return tuple(explain_bucket(bucket, itemsize=itemsize) for bucket in plan.buckets)


def explain_bucket(layout: BucketLayout, *, itemsize: int) -> Explanation:
    """Why a bucket is as large as it is.

    A floor or a least common multiple is a proof: no layout of these tensors in one bucket has smaller shards. Gaps
    depend on the order.
    """
    quantum = quantum_of(itemsize)
    numel = layout.numel - layout.padding
    least = round_up(max(-(-numel // layout.num_shards), 1), quantum)
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
    size = layout.shard_numel
    if size == least:
        return Cause.ALIGNMENT, (), quantum
    floor = max(min(slot.block, slot.numel) for slot in layout.slots)
    if size == round_up(floor, quantum):
        return Cause.FLOOR, [slot for slot in layout.slots if min(slot.block, slot.numel) == floor], floor
    # Tensors of two shards of the final size were of two at every smaller size, so their multiple skips all of these.
    long = [slot for slot in layout.slots if slot.numel >= 2 * size and slot.block > 1]
    multiple = lcm(*(slot.block for slot in long)) if long else 1
    if size - multiple < max(least, floor) and size % multiple == 0:
        forcing = [
            slot for slot in long if lcm(*(other.block for other in long if other.block != slot.block)) < multiple
        ]
        return Cause.MULTIPLE, forcing or long, multiple
    gaps = _gaps(layout)
    largest = max(gaps, key=lambda gap: gap[1], default=(layout.slots[0], 0))
    wide = [slot for slot, gap in gaps if 2 * gap >= largest[1]]
    return Cause.GAPS, wide or layout.slots[:1], largest[1]


def _gaps(layout: BucketLayout) -> list[tuple[Slot, int]]:
    """Each tensor that starts behind a gap, and the gap's elements."""
    gaps, end = [], 0
    for slot in layout.slots:
        if slot.offset > end:
            gaps.append((slot, slot.offset - end))
        end = slot.offset + slot.numel
    return gaps


def _few(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
