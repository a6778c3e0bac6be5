"""How much less crosses the wire, and how much time and memory that saves: every row of the claim, in the lab.

    python -m benchmarks.wire                            all rows, about an hour on 2 cores, recorded
    python -m benchmarks.wire --rows wire-full,losses    some rows, recorded too
    python -m benchmarks.wire --quick                    all rows on a tiny job, printed only: does the method work?

Run it on a quiet machine. Rows are measured on 2 nodes x 2 ranks unless they name others; jobs/wire.toml is the job, in
full and with LoRA.

[Note: The baselines]
FSDP2 has a true ring reduce-scatter here, and its gathers run ahead ([Note: The strongest baseline] in
strategies/ring.py): it is the baseline of every row. HSDP and DDP stand beside it. FSDP2 as Gloo runs it by itself is
"FSDP2 on Gloo's own", a footnote.

[Note: Steps that count]
Bytes are those of the interface, per node and step. They are the mean over the steps from the second on, so they hold
no initialisation. Times are the median over the timed steps of a run. No machine is equally fast at all times, so where
a row claims a ratio of times, runs alternate several times, and the row compares the medians of their medians.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.wire import traffic, seconds, placement, grid, unequal, memory  # isort: skip  # noqa: F401  they register the rows, in this order
from benchmarks.wire import picture
from benchmarks.wire.bench import BENCHMARK, COMPARED, HOME, Bench, result_key
from laconic.compare.case import STRATEGIES
from laconic.compare.plot import save_plot
from laconic.compare.result import Result
from laconic.compare.table import LEGEND, render
from tests.support.record import Record

_DOCS = Path(__file__).parents[2] / "docs"


def _order(result: Result) -> tuple[Any, ...]:
    """By cluster, job, rate (fastest first), strategy and folder, which ends with the repeat."""
    place = result.num_local * result.num_nodes, result.num_nodes
    strategy = list(STRATEGIES).index(result.strategy)
    return *place, result.job, -(result.rate_bits_per_s or math.inf), strategy, result.output


def save(record: Record, bench: Bench) -> None:
    """Write the rows and all runs, beside those of earlier commands; with the rows of `wire` draw the pictures."""
    new = {
        result_key(each): each
        for each in (dataclasses.replace(run, output=Path(run.output).name) for run in bench.results.values())
    }
    kept = {result_key(each): each for each in map(Result.from_dict, record.known.get("results", []))}
    results = sorted((kept | new).values(), key=_order)
    record.save(results=[result.to_dict() for result in results])
    if record.name == BENCHMARK.name:
        _DOCS.mkdir(exist_ok=True)
        picture.save(results, _DOCS / "levels.png")
        _draw_home([run for run in results if (run.num_nodes, run.num_local) == (HOME.nodes, HOME.local)], record)


def tables(results: list[Result]) -> str:
    """Return a table for each cluster, with its title."""
    parts = []
    for _, group in itertools.groupby(results, key=lambda result: _order(result)[:2]):
        runs = list(group)
        size = f"{runs[0].num_parameters / 1e6:.1f} M parameters"
        parts += [f"{runs[0].num_nodes} nodes x {runs[0].num_local} ranks, {size}:", render(runs)]
    return "\n\n".join(parts)


def _draw_home(results: list[Result], record: Record) -> None:
    """Draw one run of each case, fastest wire first, and only jobs and rates at which laconic and FSDP2 ran."""
    first: dict[tuple[Any, ...], Result] = {}
    for result in results:
        if result.strategy in COMPARED:
            first.setdefault((result.job, result.rate_bits_per_s, result.strategy), result)
    whole = {key[:2] for key in first if all((*key[:2], name) in first for name in ("fsdp2", "host"))}
    shown = [result for key, result in first.items() if key[:2] in whole]
    if shown:
        millions = max(result.num_parameters for result in shown) / 1e6
        cluster = f"{HOME.nodes} nodes x {HOME.local} ranks on {record.machine['cores']} cores"
        save_plot(shown, _DOCS / "wire.png", title=f"{cluster}, {millions:.1f} M parameters, fp32")


BENCHMARK.save = save
BENCHMARK.details = lambda bench: f"{tables(sorted(bench.results.values(), key=_order))}\n\n{LEGEND}"

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
