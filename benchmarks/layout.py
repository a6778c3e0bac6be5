"""How much ragged layouts pad, and how much time and memory they save: every row of the claim.

    python -m benchmarks.layout                              all rows, recorded in RESULTS.md
    python -m benchmarks.layout --rows padding-1,padding-16  some rows, recorded too
    python -m benchmarks.layout --rows many-ranks,many-ranks-rows
                                                             published models on up to 16,384 ranks, in a minute or two
    python -m benchmarks.layout --quick                      few group sizes and a tiny job, printed only

Padding and planning time are arithmetic and take some minutes for all 1017 group sizes. Step time and memory are
measured in the lab on a quiet machine.

[Note: The previous engine]
The previous engine did not compute gradients in their buckets. The row `step-time` compares the times of both engines:
both source trees run in the same lab, in turn. The previous tree is the parent of the commit that added `ADDED_FILE`.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import many_ranks, previous, scaled_rank
from benchmarks.many_ranks import ManyRanks
from laconic.compare import Case, Comparison, Result
from laconic.compare.markdown import markdown
from laconic.compare.progress import ConsoleReporter
from laconic.config import load
from laconic.layout import packing
from laconic.layout.explain import Cause, Explanation, explain
from laconic.layout.granularity import rows
from laconic.plan.padding import UnitShapes, fsdp2_numel, lcm_numel, plan_of
from tests.support.layers import DEEPSEEK_V3, GPT_OSS_120B
from tests.support.measure import Benchmark
from tests.support.record import Record, Row

_REPOSITORY = Path(__file__).parents[1]
ADDED_FILE = "src/laconic/shard/linear.py"
_NODES, _LOCAL = 2, 2
_STEPS, _REPEATS = 12, 3
_MEMORY_STRATEGIES = ("fsdp2", "host", "none")
_COLUMNS = ("layer", "ranks", "1 row", "16 rows", "32 rows", "128 rows", "FSDP2", "LCM")
LAYERS = {"DeepSeek-V3": DEEPSEEK_V3, "GPT-OSS-120B": GPT_OSS_120B}
SHOWN = (8, 64, 96, 100, 128, 256, 384, 512, 768, 1000, 1024)
"""The group sizes in the table of RESULTS.md."""
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
    reasons: tuple[Explanation, ...]


@dataclass
class Bench:
    """The padding of all cases; each case is planned once."""

    out: Path
    quick: bool
    cases: dict[tuple[str, int, int], Padding] = field(default_factory=dict)
    many: ManyRanks | None = None
    """Published models on many ranks, if a row has asked for them."""

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
        reasons=explain(plan, itemsize=_BF16_BYTES),
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
    prepare=lambda options: Bench(options.out, options.quick),
    save=lambda record, bench: save(record, table(bench), bench.many),
    details=lambda bench: _render(table(bench)),
)


@BENCHMARK.row("padding-1")
def padding_1(bench: Bench) -> Row:
    return padding_row(bench, num_rows=1, limit=0.02)


@BENCHMARK.row("padding-16")
def padding_16(bench: Bench) -> Row:
    return padding_row(bench, num_rows=16, limit=0.05)


def padding_row(bench: Bench, *, num_rows: int, limit: float) -> Row:
    """Return the row of blocks of `num_rows` rows, which may pad by `limit` at most."""
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
        required=f"<= {limit:.0%}, and <= 2 points above the better of FSDP2's and the LCM rule",
        measured=f"{worst.planned:.2%} at worst, {100 * excess:+.2f} points at worst",
        is_met=worst.planned <= limit and excess <= 0.02,
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


@BENCHMARK.row("padding-coarse")
def padding_coarse(bench: Bench) -> Row:
    parts, notes, unexplained, above = [], [], 0, 0
    for num_rows in (32, 128):
        by_layer = bench.all(num_rows)
        cases = [case for layer_cases in by_layer.values() for case in layer_cases]
        above += sum(case.planned > case.one_bucket for case in cases)
        cliffs = [case for case in cases if case.planned > 0.05]
        causes = [_main_cause(case) for case in cliffs]
        unexplained += causes.count(None)
        parts.append(f"{num_rows} rows: {max(case.planned for case in cases):.2%} at worst")
        for layer, layer_cases in by_layer.items():
            worst = max(layer_cases, key=lambda case: case.planned)
            reasons = "; ".join(str(reason) for reason in worst.reasons if reason.padding > 0)
            notes.append(
                f"{layer}, {num_rows} rows: mean {statistics.fmean(case.planned for case in layer_cases):.2%}, at most "
                f"{worst.planned:.2%} on {worst.num_ranks} ranks (one bucket: {worst.one_bucket:.2%}): {reasons}"
            )
        counts = ", ".join(f"{causes.count(cause)} by {cause.value}" for cause in Cause if cause in causes)
        notes.append(f"{num_rows} rows: {len(cliffs)} of {len(cases)} plans pad more than 5 %, forced {counts or '-'}")
    return Row(
        claim="the same, blocks of 32 and 128 rows",
        required="reported, never above the single-bucket plan, each cliff explained",
        measured=f"{', '.join(parts)}; {above} plans above one bucket; {unexplained} cliffs unexplained",
        is_met=above == 0 and unexplained == 0,
        note=". ".join(notes) + ". Remedy: a smaller group, or lower blocks.",
    )


def _main_cause(case: Padding) -> Cause | None:
    """The cause of most of a plan's padding; None if the cause is alignment, which explains no cliff."""
    worst = max(case.reasons, key=lambda reason: reason.padding)
    return worst.cause if worst.cause is not Cause.ALIGNMENT else None


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
        required="<= 0.3 s each",
        measured=f"{worst_s:.3f} s at worst; 16,384 ranks: {many_s:.3f} s",
        is_met=worst_s <= 0.3,
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


@BENCHMARK.row("step-time")
def step_time(bench: Bench) -> Row:
    """Time full training with AdamW on an unshaped wire: this engine, FSDP2, and the previous engine."""
    repeats = 1 if bench.quick else _REPEATS
    times: dict[str, list[float]] = {"fsdp2": [], "now": [], "before": []}
    revision = previous.parent_of_added(ADDED_FILE)
    with previous.source_at(revision, bench.out) as source, _comparison("wire.toml", bench.out / "step-time") as lab:
        for repeat in range(repeats):
            times["fsdp2"].append(_run(lab, "fsdp2", repeat).step_s)
            times["now"].append(_run(lab, "host", repeat).step_s)
            with previous.running(source):
                times["before"].append(_run(lab, "host", repeat + repeats).step_s)
    fsdp2, now, before = (statistics.median(times[name]) for name in ("fsdp2", "now", "before"))
    return Row(
        claim="step time on an unshaped wire, full training with AdamW, against FSDP2 / against the engine before",
        required="<= 0.75x / <= 1.00x",
        measured=f"{now / fsdp2:.3f}x / {now / before:.3f}x",
        is_met=now / fsdp2 <= 0.75 and now / before <= 1,
        note=(
            f"jobs/wire.toml, cache=host: {now:.3f} s, FSDP2 {fsdp2:.3f} s, before {before:.3f} s; medians of "
            f"{repeats} alternating runs each: now {_list(times['now'])}, before {_list(times['before'])}."
        ),
    )


_MOST_BYTES = {"fp8_128x128": 0.51, "fp8_1x128": 0.51, "fp8_1x128_e8m0": 0.51, "mxfp8": 0.52, "nvfp4": 0.29}
"""Of each scaled format, the most bytes against bf16."""


@BENCHMARK.row("scaled")
def scaled(bench: Bench) -> Row:
    """Count the bytes of weights that are gathered in few bits, and compare losses with those of whole weights."""
    steps = 2 if bench.quick else 8
    in_bf16 = scaled_rank.measure(scaled_rank.BF16, steps)
    wire, cache, apart = {}, {}, {}
    for name in _MOST_BYTES:
        found = scaled_rank.measure(name, steps)
        wire[name] = sum(each.wire_bytes for each in found) / sum(each.wire_bytes for each in in_bf16)
        cache[name] = sum(each.cache_bytes for each in found) / sum(each.cache_bytes for each in in_bf16)
        apart[name] = scaled_rank.largest_difference(found)
    is_met = {name: max(wire[name], cache[name]) <= most for name, most in _MOST_BYTES.items()}
    each = "; ".join(f"{name} {wire[name]:.4f}x / {cache[name]:.4f}x" for name in _MOST_BYTES)
    equal = [name for name in _MOST_BYTES if apart[name] == 0]
    return Row(
        claim=(
            "FP8 128 x 128 and 1 x 128, MXFP8, NVFP4 gathers: bytes on the wire / in the cache against bf16; losses "
            "against the same quantisation unsharded"
        ),
        required=", ".join(f"{name} <= {most:.2f}x" for name, most in _MOST_BYTES.items()) + "; equal to the bit",
        measured=f"{each}; losses of {len(equal)} of {len(apart)} formats equal to the bit",
        is_met=all(is_met.values()) and len(equal) == len(apart),
        measures=("laconic.codec", "laconic.layers", "laconic.layout", "laconic.ragged", "laconic.shard"),
        note=(
            f"2 nodes x 2 ranks, {steps} steps of AdamW on fp32 weights, computed in bf16, cache=host; all parameters "
            "are those of linear layers, of sizes that need no padding (row padding-coarse has that of 128 rows). An "
            "fp32 scale per 128 values is 1/64 of the values in bf16, so fp8_1x128 takes 0.5156x whatever the engine "
            "does; with scales that are powers of two (e8m0) it takes 0.5039x. Over the bound: "
            f"{', '.join(name for name, met in is_met.items() if not met) or 'none'}. The largest difference of a loss "
            f"is {max(apart.values()):.2g}."
        ),
    )


@BENCHMARK.row("reserved")
def reserved(bench: Bench) -> Row:
    """Compare the peak memory of full training with FSDP2's, on a dense model and on one with fused experts."""
    ratios, each = {}, []
    for job in ("experts.toml", "wire.toml"):
        with _comparison(job, bench.out / f"reserved-{job.removesuffix('.toml')}") as lab:
            peaks = {name: _peak(lab.run(Case(strategy=name, steps=3))) for name in _MEMORY_STRATEGIES}
        ratios[job] = {name: peaks[name] / peaks["fsdp2"] for name in ("host", "none")}
        each.append(
            f"{job}: host {peaks['host'] / 1e6:.1f}, none {peaks['none'] / 1e6:.1f}, "
            f"FSDP2 {peaks['fsdp2'] / 1e6:.1f} MB"
        )
    mix = ratios["experts.toml"]
    return Row(
        claim="reserved memory against FSDP2, on a unit mix like GPT-OSS's",
        required="<= 0.88x",
        measured=f"host {mix['host']:.3f}x, none {mix['none']:.3f}x",
        is_met=max(mix.values()) <= 0.88,
        note=(
            "fused experts whose number the ranks do not divide; the most that torch's allocator held on a rank in a "
            f"step; {'; '.join(each)} (the dense model: host {ratios['wire.toml']['host']:.3f}x, none "
            f"{ratios['wire.toml']['none']:.3f}x)."
        ),
    )


def _comparison(job: str, out: Path) -> Comparison:
    return Comparison(
        load(_REPOSITORY / "benchmarks" / "jobs" / job), out, nodes=_NODES, local=_LOCAL, reporter=ConsoleReporter()
    )


def _run(lab: Comparison, strategy: str, repeat: int) -> Result:
    return lab.run(Case(strategy=strategy, steps=_STEPS, measure_memory=False, log_every=100, repeat=repeat))


def _peak(result: Result) -> float:
    return result.allocated_peak_bytes or math.nan


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) + " s"


def table(bench: Bench) -> list[list[str]]:
    """Return the padding at the shown group sizes that were planned: layer, ranks, four block heights, other rules."""
    lines = []
    for layer, shapes in LAYERS.items():
        for size in SHOWN:
            found = [bench.cases.get((layer, size, num_rows)) for num_rows in (1, 16, 32, 128)]
            if not any(found):
                continue
            others = [rule(shapes.shapes, size) / shapes.numel - 1 for rule in (fsdp2_numel, lcm_numel)]
            lines.append([layer, str(size), *map(_cell, found), *(f"{other:.2%}" for other in others)])
    return lines


def _cell(case: Padding | None) -> str:
    if case is None:
        return "-"
    buckets = f" ({case.num_buckets})" if case.num_buckets > 1 else ""
    return f"{case.planned:.2%}{buckets}"


def save(record: Record, table: list[list[str]], many: ManyRanks | None = None) -> None:
    """Write the rows, and the table of some group sizes; a table with gaps does not replace the recorded one.

    So does the table of published models, if they were planned in this run.
    """
    is_whole = bool(table) and all("-" not in line for line in table)
    table = table if is_whole else record.known.get("table", [])
    published = record.known.get("published", {"caption": "", "table": []})
    if many is not None:
        published = {"caption": many_ranks.caption(many), "table": many_ranks.table(many)}
    more = ["Padding of a layer at some group sizes; (n): in n buckets.", _render(table)] if table else []
    if published["table"]:
        more += [published["caption"], markdown(many_ranks.COLUMNS, published["table"], num_text_columns=1)]
    record.save(more=more, table=table, published=published)


def _render(table: list[list[str]]) -> str:
    return markdown(_COLUMNS, table, num_text_columns=1)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
