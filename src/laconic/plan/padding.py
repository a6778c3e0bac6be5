"""The padding of a model's layouts at a list of group sizes, compared with the padding of other rules."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from laconic.layout.explain import Explanation, explain
from laconic.layout.granularity import Block, rows
from laconic.layout.packing import UnitPlan, plan_unit
from laconic.plan.rules import fsdp2_numel, lcm_numel
from laconic.plan.shapes import UnitShapes


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """The padding of a model on one number of ranks with blocks of one height."""

    num_ranks: int
    num_rows: int
    """The number of rows of a block."""
    padding: float
    """The padding as a share of the model's elements."""
    fsdp2: float
    """The same share under FSDP2's rule, which keeps single rows whole."""
    lcm: float
    """The same share under Megatron-FSDP's rule, which keeps single rows whole."""
    num_buckets: int
    """The largest number of buckets of a unit."""
    explanations: tuple[tuple[str, Explanation], ...]
    """For each bucket of each unit: the name of the unit, and the reason for the bucket's padding."""


def plan_of(unit: UnitShapes, num_ranks: int, block: Block, *, itemsize: int) -> UnitPlan:
    """Plan one unit. All its tensors have the granularity `block`; the smallest dtype sent has `itemsize` bytes."""
    blocks = [block.numel(shape) for shape in unit.shapes]
    return plan_unit(unit.names, unit.shapes, blocks, num_shards=num_ranks, itemsize=itemsize)


def layout_rows(
    units: Sequence[UnitShapes], ranks: Iterable[int], row_counts: Sequence[int], *, itemsize: int
) -> Iterator[LayoutRow]:
    """Yield a row for each number of ranks and, within it, for each number of rows per block in `row_counts`."""
    total = sum(unit.count * unit.numel for unit in units)

    def share(numels: Iterable[int]) -> float:
        return sum(unit.count * numel for unit, numel in zip(units, numels, strict=True)) / total - 1

    for num_ranks in ranks:
        fsdp2 = share(fsdp2_numel(unit.shapes, num_ranks) for unit in units)
        lcm = share(lcm_numel(unit.shapes, num_ranks) for unit in units)
        for num_rows in row_counts:
            plans = [plan_of(unit, num_ranks, rows(num_rows), itemsize=itemsize) for unit in units]
            reasons = [explain(plan, itemsize=itemsize) for plan in plans]
            yield LayoutRow(
                num_ranks=num_ranks,
                num_rows=num_rows,
                padding=share(plan.numel for plan in plans),
                fsdp2=fsdp2,
                lcm=lcm,
                num_buckets=max(len(plan.buckets) for plan in plans),
                explanations=tuple(
                    (unit.name, reason) for unit, found in zip(units, reasons, strict=True) for reason in found
                ),
            )
