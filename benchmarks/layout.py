"""How much ragged layouts pad, and how long a plan takes: every row of the claim.

    python -m benchmarks.layout                              all rows, recorded
    python -m benchmarks.layout --rows padding-1,padding-16  some rows, recorded too
    python -m benchmarks.layout --rows many-ranks,many-ranks-rows
                                                             published models on up to 16,384 ranks, in a minute or two
    python -m benchmarks.layout --rows tiles                 weights in tiles of 128 x 128 on 10,240 ranks
    python -m benchmarks.layout --quick                      few group sizes, printed only

Padding and planning time are arithmetic and take some minutes for all 1017 group sizes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks import many_ranks, tiles
from benchmarks.many_ranks import ManyRanks
from laconic.layout import packing
from laconic.layout.granularity import rows
from laconic.plan.padding import UnitShapes, fsdp2_numel, lcm_numel, plan_of
from tests.support.layers import DEEPSEEK_V3, GPT_OSS_120B
from tests.support.measure import Benchmark
from tests.support.record import Record, Row, Table

_COLUMNS = ("layer", "ranks", "1 row", "16 rows", "32 rows", "128 rows", "FSDP2", "LCM")
LAYERS = {"DeepSeek-V3": DEEPSEEK_V3, "GPT-OSS-120B": GPT_OSS_120B}
SHOWN = (8, 64, 96, 100, 128, 256, 384, 512, 768, 1000, 1024)
"""The group sizes in the table."""
_EVERY = range(8, 1025)
_QUICK = (8, 96, 100, 384, 768, 1024)
_QUICK_MODELS = ("gpt-oss-120b",)
_BF16_BYTES = 2
_MANY_RANKS = 16384
_REMEASURED = 5
"""The number of slowest plans to time again, because other work of the machine may slow down a single plan."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The padding of one layer on one number of ranks with one block height, as fractions of the layer's elements."""

    num_ranks: int
    num_buckets: int
    planned: float
    """The padding of laconic's plan."""
    one_bucket: float
    """The padding with all parameters in one bucket, in the order of definition."""
    other_rules: float
    """The padding under the better of FSDP2's and Megatron-FSDP's rules, which keep single rows whole."""
    plan_s: float
    """The CPU seconds of planning."""


@dataclass
class Bench:
    """The padding of all cases; each case is planned once."""

    quick: bool
    cases: dict[tuple[str, int, int], Padding] = field(default_factory=dict)
    many: ManyRanks | None = None
    """Published models on many ranks, if a row has asked for them."""
    tiles: list[list[str]] = field(default_factory=list)
    """The table of the row `tiles`."""

    @property
    def published(self) -> ManyRanks:
        """The same, made now."""
        if self.many is None:
            self.many = ManyRanks(_QUICK_MODELS) if self.quick else ManyRanks()
        return self.many

    @property
    def sizes(self) -> Iterable[int]:
        """The group sizes to plan for."""
        return _QUICK if self.quick else _EVERY

    def get(self, layer: str, num_ranks: int, num_rows: int) -> Padding:
        """Return the padding of one case."""
        key = layer, num_ranks, num_rows
        if key not in self.cases:
            self.cases[key] = _measure(LAYERS[layer], num_ranks, num_rows)
        return self.cases[key]

    def all(self, num_rows: int) -> dict[str, list[Padding]]:
        """Return the padding of each layer at all group sizes."""
        return {layer: [self.get(layer, size, num_rows) for size in self.sizes] for layer in LAYERS}


def _measure(layer: UnitShapes, num_ranks: int, num_rows: int) -> Padding:
    plan_s = plan_time_s(layer, num_ranks, num_rows)
    plan = plan_of(layer, num_ranks, rows(num_rows), itemsize=_BF16_BYTES)
    one_bucket = packing.plan_bucket(
        layer.names,
        layer.shapes,
        [rows(num_rows).numel(shape) for shape in layer.shapes],
        num_shards=num_ranks,
        itemsize=_BF16_BYTES,
    )
    others = min(fsdp2_numel(layer.shapes, num_ranks), lcm_numel(layer.shapes, num_ranks))
    return Padding(
        num_ranks=num_ranks,
        planned=plan.numel / layer.numel - 1,
        one_bucket=one_bucket.numel / layer.numel - 1,
        other_rules=others / layer.numel - 1,
        num_buckets=len(plan.buckets),
        plan_s=plan_s,
    )


def plan_time_s(layer: UnitShapes, num_ranks: int, num_rows: int) -> float:
    """Return the CPU seconds of this thread to plan a layer with empty caches."""
    packing.pack.cache_clear()
    packing.best_parts.cache_clear()
    begin = time.thread_time()
    plan_of(layer, num_ranks, rows(num_rows), itemsize=_BF16_BYTES)
    return time.thread_time() - begin


BENCHMARK = Benchmark(
    measures=("laconic.layout", "laconic.ragged", "laconic.shard"),
    name="layout",
    prepare=lambda options: Bench(options.quick),
    save=lambda record, bench: save(record, bench),
    details=lambda bench: table(bench).markdown(),
)


@BENCHMARK.row("padding-1")
def padding_1(bench: Bench) -> Row:
    return padding_row(bench, num_rows=1)


@BENCHMARK.row("padding-16")
def padding_16(bench: Bench) -> Row:
    return padding_row(bench, num_rows=16)


def padding_row(bench: Bench, *, num_rows: int) -> Row:
    """Return the row of blocks of `num_rows` rows."""
    by_layer = bench.all(num_rows)
    cases = [case for layer_cases in by_layer.values() for case in layer_cases]
    worst = max(cases, key=lambda case: case.planned)
    furthest = max(cases, key=lambda case: case.planned - case.other_rules)
    excess = furthest.planned - furthest.other_rules
    each = "; ".join(f"{layer}: {_extremes(layer_cases)}" for layer, layer_cases in by_layer.items())
    sizes = sorted({case.num_ranks for case in cases})
    return Row(
        claim=(
            f"padding, DeepSeek-V3 and GPT-OSS-120B layers, blocks of {num_rows} row{'s' * (num_rows > 1)}, "
            f"{len(sizes)} group sizes from {sizes[0]} to {sizes[-1]}"
        ),
        measured=f"{worst.planned:.2%} at worst, {100 * excess:+.2f} points at worst",
        note=(
            f"{each}. Worst on {worst.num_ranks} ranks; furthest above the other rules, which keep single rows whole "
            f"whatever the block, on {furthest.num_ranks}. bf16, shards on 16 bytes, at most {packing.MAX_BUCKETS} "
            f"buckets, {_buckets(cases)}."
        ),
    )


def _extremes(cases: list[Padding]) -> str:
    planned, one_bucket, other_rules = (
        [getattr(case, name) for case in cases] for name in ("planned", "one_bucket", "other_rules")
    )
    return (
        f"at most {max(planned):.2%}, mean {statistics.fmean(planned):.2%}, in one bucket at most "
        f"{max(one_bucket):.2%}, the better of the other rules at most {max(other_rules):.2%}"
    )


def _buckets(cases: list[Padding]) -> str:
    counts = [case.num_buckets for case in cases]
    return ", ".join(
        f"{counts.count(count) / len(counts):.0%} of the plans with {count}" for count in sorted(set(counts))
    )


@BENCHMARK.row("planning-time")
def planning_time(bench: Bench) -> Row:
    timed = {
        (layer, size, num_rows): bench.get(layer, size, num_rows).plan_s
        for layer in LAYERS
        for num_rows in (1, 16, 32, 128)
        for size in bench.sizes
    }
    for num_rows in (1, 16, 32, 128):
        timed["DeepSeek-V3", _MANY_RANKS, num_rows] = plan_time_s(DEEPSEEK_V3, _MANY_RANKS, num_rows)
    slowest = sorted(timed, key=lambda key: -timed[key])[: 1 if bench.quick else _REMEASURED]
    for key in slowest:
        layer, size, num_rows = key
        timed[key] = statistics.median(plan_time_s(LAYERS[layer], size, num_rows) for _ in range(3))
    (layer, size, num_rows), worst_s = max(timed.items(), key=lambda item: item[1])
    many_s = max(timed["DeepSeek-V3", _MANY_RANKS, num_rows] for num_rows in (1, 16, 32, 128))
    return Row(
        claim="planning time with the partition search, every case above, and 782 tensors on 16,384 ranks",
        measured=f"{worst_s:.3f} s at worst; 16,384 ranks: {many_s:.3f} s",
        note=(
            f"slowest: {layer}, {size} ranks, {num_rows} rows; median of all {len(timed)} plans "
            f"{statistics.median(timed.values()) * 1e3:.1f} ms; caches empty, pure Python, the planning thread's CPU "
            "time; the slowest plans are the median of three readings."
        ),
    )


@BENCHMARK.row("many-ranks")
def many_ranks_recommended(bench: Bench) -> Row:
    return many_ranks.many_ranks(bench.published)


@BENCHMARK.row("many-ranks-rows")
def many_ranks_rows(bench: Bench) -> Row:
    return many_ranks.many_ranks_rows(bench.published)


@BENCHMARK.row("tiles")
def shared_tiles(bench: Bench) -> Row:
    row, bench.tiles = tiles.tiles(bench.published)
    return row


def table(bench: Bench) -> Table:
    """Return the padding at the shown group sizes that were planned: layer, ranks, four block heights, other rules."""
    lines = []
    for layer, shapes in LAYERS.items():
        for size in SHOWN:
            found = [bench.cases.get((layer, size, num_rows)) for num_rows in (1, 16, 32, 128)]
            if not any(found):
                continue
            others = [rule(shapes.shapes, size) / shapes.numel - 1 for rule in (fsdp2_numel, lcm_numel)]
            lines.append([layer, str(size), *map(_cell, found), *(f"{other:.2%}" for other in others)])
    return Table(columns=_COLUMNS, rows=lines, caption="Padding of a layer at some group sizes; (n): in n buckets.")


def _cell(case: Padding | None) -> str:
    if case is None:
        return "-"
    buckets = f" ({case.num_buckets})" if case.num_buckets > 1 else ""
    return f"{case.planned:.2%}{buckets}"


def save(record: Record, bench: Bench) -> None:
    """Write the rows and the tables. A table that this run did not make, or with gaps, replaces no recorded one."""
    shown = table(bench)
    tables = {"padding": shown} if shown.rows and all("-" not in line for line in shown.rows) else {}
    if bench.many is not None and "cells" in vars(bench.many):
        tables["published"] = many_ranks.table(bench.many)
    if bench.tiles is not None:
        tables["tiles"] = bench.tiles
    record.save(tables)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
