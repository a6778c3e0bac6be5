"""The rows `bytes-interface`, `seconds` and `best`: predictions against runs in the lab."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby

from benchmarks.plan.bench import Bench
from benchmarks.plan.jobs import ISLANDS, PEERS, STRATEGIES, VARIANTS, Case, candidate_of, make_cases
from benchmarks.plan.lab import Run
from laconic.lab import format_rate
from tests.support.record import Row, Table

RATES = (20e6, 50e6, 100e6, 200e6, None)
_STRATEGIES = ("none", "host", "device", "8bit", "4bit", "zero++", "fsdp2", "fsdp2-hpz", "hsdp", "ddp")
_ON_SLOW_WIRES = ("none", "host", "8bit", "4bit", "zero++", "fsdp2", "ddp")
_COMPARED = ("none", "host", "fsdp2", "hsdp", "ddp")
_MORE = ("fsdp2-gloo", "fsdp2-two-level", "ddp-bf16", "ddp-powersgd", "islands fp32", "islands int4")
_ON_THREE = ("none", "host", "4bit", "zero++", "fsdp2", "fsdp2-gloo", "ddp")
_NEW: tuple[tuple[str, str, tuple[str, ...], tuple[int, int], float | None], ...] = (
    ("demo", "weights stay", ("host", "none"), (2, 2), 200e6),
    ("demo", "offload", ("host",), (2, 2), 200e6),
    ("demo", "checks", ("host", "4bit"), (2, 2), 200e6),
    ("demo", "5 micro-batches", ("host", "8bit"), (2, 2), 100e6),
    ("demo", "checkpointing", ("none", "4bit"), (2, 2), 100e6),
    ("qwen2", "2 micro-batches", ("host", "zero++"), (2, 2), 200e6),
    ("qwen2", "bf16 parameters", ("host", "fsdp2"), (2, 2), 100e6),
    ("gpt2", "muon", ("host",), (2, 2), 200e6),
    ("gpt2", "adamw8bit", ("host",), (2, 2), 200e6),
    ("gpt2", "", ("4bit", "8bit"), (2, 2), 100e6),
    ("experts", "", ("host", "none", "fsdp2"), (2, 2), 50e6),
    ("vocabulary", "", ("host", "4bit", "fsdp2", "hsdp"), (2, 2), 200e6),
    ("deep", "NF4", ("host",), (2, 2), 100e6),
    ("demo", "", ("host", "fsdp2", "hsdp", "ddp"), (4, 1), 200e6),
    ("deep", "", ("host", "4bit", "fsdp2"), (3, 1), None),
)
"""(model, variant, strategies, cluster, rate) of runs with what no run had before, later than the planner's rules."""
_EXACT = ("none", "host", "device", "fsdp2", "fsdp2-gloo", "fsdp2-hpz", "fsdp2-two-level", "hsdp", "ddp")
_FEW_BYTES = 1e6
"""Where a step sends less at a node's interface, headers of small messages weigh too much to be left out."""
_CLOSE = 0.05


def cases_at(
    bench: Bench, model: str, rate: float | None, names: Sequence[str], variant: str = "", *, steps: int = 0
) -> list[Case]:
    """A model under strategies, in few steps where a step takes long."""
    usual = 12 if rate is None else 3 if rate < 40e6 else 4 if rate < 80e6 else 8
    tables = {**STRATEGIES, **ISLANDS, **PEERS}
    layers = [{"data": {"sequence_length": 128}, "train": {"micro_batch_size": 4}}]
    layers += [VARIANTS[variant]] if variant else []
    jobs = [(f"{name}, {variant}" if variant else name, [*layers, tables[name]], candidate_of(name)) for name in names]
    return make_cases(model, jobs, out=bench.out / f"lab-{format_rate(rate)}", steps=steps or usual)


def runs_at(bench: Bench, rate: float | None) -> list[Run]:
    """The runs of all strategies at a rate on 2 x 2."""
    names = _STRATEGIES if rate is None or rate > 40e6 else _ON_SLOW_WIRES
    names = ("none", "host", "4bit", "fsdp2") if bench.quick else names
    return bench.lab.runs(cases_at(bench, "demo", rate, names), 2, 2, rate)


def others_at(bench: Bench, rate: float | None) -> list[Run]:
    """The runs of other models at a rate on 2 x 2."""
    models = ("gpt2", "qwen2", "deep") if rate == 200e6 else ("gpt2", "qwen2")
    return [run for model in models for run in bench.lab.runs(cases_at(bench, model, rate, _COMPARED), 2, 2, rate)]


def more_runs(bench: Bench) -> list[Run]:
    """The runs of the rows `bytes-interface` and `seconds`: other strategies, LoRA, and three nodes of one rank."""
    rate = 200e6
    found = bench.lab.runs(cases_at(bench, "demo", rate, _MORE), 2, 2, rate)
    found += bench.lab.runs(cases_at(bench, "demo", rate, ("none", "host", "fsdp2"), "LoRA"), 2, 2, rate)
    return found + bench.lab.runs(cases_at(bench, "demo", rate, _ON_THREE), 3, 1, rate)


def new_runs(bench: Bench) -> list[Run]:
    """The runs of `_NEW`."""
    return [
        run
        for model, variant, names, (nodes, local), rate in _NEW
        for run in bench.lab.runs(cases_at(bench, model, rate, names, variant), nodes, local, rate)
    ]


def all_runs(bench: Bench) -> list[Run]:
    """The runs of the rows `seconds` and `best`."""
    found = [run for rate in ((200e6,) if bench.quick else RATES) for run in runs_at(bench, rate)]
    if not bench.quick:
        found += [run for rate in (100e6, 200e6, None) for run in others_at(bench, rate)]
    return found


def interface(bench: Bench) -> Row:
    """Measure the row `bytes-interface`."""
    found = runs_at(bench, 200e6)
    if not bench.quick:
        found += others_at(bench, 200e6) + more_runs(bench)
    judged = [run for run in found if run.wire_bytes >= _FEW_BYTES]
    few = [f"{r.name}: {r.wire_bytes / 1e3:.0f} kB, {r.bytes_error:+.1%}" for r in found if r.wire_bytes < _FEW_BYTES]
    worst = max(judged, key=lambda run: abs(run.bytes_error))
    median = statistics.median(abs(run.bytes_error) for run in judged)
    strategies = sorted({run.case.candidate for run in found})
    bench.tables["bytes-interface"] = Table(
        columns=("run", "interface MB, said", "measured", ""),
        rows=[[r.name, f"{r.estimate.interface_bytes / 1e6:.3f}", f"{r.wire_bytes / 1e6:.3f}", f"{r.bytes_error:+.2%}"]
         for r in found],
    )  # fmt: skip
    return Row(
        key="bytes-interface",
        claim="bytes of a step at a node's interface, ours and every peer that runs here",
        measured=f"{abs(worst.bytes_error):.2%} at worst, median {median:.2%}, {len(strategies)} strategies, "
        f"{len(judged)} runs that send 1 MB a step or more",
        note=f"{', '.join(strategies)}; payload times the header factor of the lab's cluster file, which `laconic plan "
        f"measure` wrote at 200mbit before the runs. Worst: {worst.name} ({worst.bytes_error:+.2%})."
        + (f" Not judged, as headers of small messages weigh too much: {'; '.join(few)}." if few else ""),
    )


def seconds(bench: Bench) -> Row:
    """Measure the row `seconds`."""
    found = all_runs(bench)
    new: list[Run] = []
    if not bench.quick:
        found += more_runs(bench)
        new = new_runs(bench)
        found += new
    worst, median = _worst(found), _median(found)
    bench.tables["seconds"] = Table(
        columns=("run", "s, said", "measured", "", "waits for"),
        rows=[[r.name, f"{r.estimate.seconds:.3f}", f"{r.seconds:.3f}", f"{r.seconds_error:+.1%}",
          r.estimate.bound_by.value] for r in found],
    )  # fmt: skip
    by_rate = "; ".join(
        f"{format_rate(rate)}: {_median(group):.1%}"
        for rate in RATES
        if (group := [run for run in found if run.rate_bits_per_s == rate])
    )
    return Row(
        key="seconds",
        claim=f"seconds of a step, {len(found)} runs in the lab, 20 Mbit/s to unshaped, peers included",
        measured=f"median {median:.1%}, worst {abs(worst.seconds_error):.1%}"
        + (f"; of {len(new)} new runs {_median(new):.1%} and {abs(_worst(new).seconds_error):.1%}" if new else ""),
        note=f"{', '.join(sorted({run.case.candidate for run in found}))}, on 2 x 2, 3 x 1 and 4 x 1. Worst: "
        f"{worst.name} ({worst.seconds_error:+.1%}); medians by rate: {by_rate}. The cluster files were measured "
        f"before the runs, one for each rate. The machine is not even: {_spread(bench)}. Two rules came after the "
        "runs of Muon, which had been said to take an eighth of their seconds: products outside the model count, and "
        "each operation takes the time of its launch, as in the model.",
    )


def _spread(bench: Bench) -> str:
    """The rates of products in the cluster files of one cluster."""
    rates = [bench.lab.cluster(2, 2, rate).flops_per_s("float32") / 1e9 for rate in RATES]
    return f"in the {len(rates)} files of 2 x 2, products run at {min(rates):.0f} to {max(rates):.0f} GFLOP/s"


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(abs(run.seconds_error) for run in runs)


def _worst(runs: Sequence[Run]) -> Run:
    return max(runs, key=lambda run: abs(run.seconds_error))


def best(bench: Bench) -> Row:
    """Measure the row `best`: is the exact strategy with the fewest predicted seconds the fastest of those measured?"""
    found = [run for run in all_runs(bench) if run.case.candidate in _EXACT]
    lines, good = [], 0
    cases = groupby(found, key=lambda run: (run.case.name.partition(",")[0], run.nodes, run.local, run.rate_bits_per_s))
    for (model, nodes, local, rate), group in cases:
        runs = list(group)
        chosen, fastest = min(runs, key=lambda r: r.estimate.seconds), min(runs, key=lambda r: r.seconds)
        lost = chosen.seconds / fastest.seconds - 1
        good += lost <= _CLOSE
        lines.append([f"{model}, {nodes} x {local}, {format_rate(rate)}", chosen.case.candidate,
                      f"{chosen.seconds:.3f}", fastest.case.candidate, f"{fastest.seconds:.3f}",
                      f"{lost:+.1%}"])  # fmt: skip
    bench.tables["best"] = Table(columns=("job", "recommended", "s", "fastest", "s", "lost"), rows=lines)
    return Row(
        key="best",
        claim=f"the recommended configuration is the fastest of those measured, or within {_CLOSE:.0%}",
        measured=f"{good} of {len(lines)}",
        note="among strategies that train the same: " + ", ".join(sorted({run.case.candidate for run in found})) + ".",
    )
