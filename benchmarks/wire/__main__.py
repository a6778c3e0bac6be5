"""How much less crosses the wire, and how much time and memory that saves: every row of the claim, in the lab.

    python -m benchmarks.wire                            all rows, about an hour on 2 cores, recorded in RESULTS.md
    python -m benchmarks.wire --rows wire-full,losses    some rows, recorded too
    python -m benchmarks.wire --quick                    all rows on a tiny job, printed only: does the method work?

    python -m benchmarks.wire --rows wire-full,levels,time-2x2,time-4x1,clusters,gpt2,unshaped,before,device-memory

measures what is claimed against PyTorch's own strategies: about 45 minutes. Run it on a quiet machine. Rows are
measured on 2 nodes x 2 ranks unless they name others; jobs/wire.toml is the training job, in full and with LoRA.

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

from benchmarks.wire import traffic, seconds, placement, grid, budgets, unequal, shares, memory  # isort: skip  # noqa: F401  they register the rows, in this order
from benchmarks.wire import picture
from benchmarks.wire.bench import BENCHMARK, HOME, Bench, result_key
from laconic.compare import STRATEGIES, Result
from laconic.compare.plot import save_plot
from laconic.compare.table import LEGEND, render
from tests.support.record import Record

_DOCS = Path(__file__).parents[2] / "docs"


def sorted_results(bench: Bench) -> list[Result]:
    """Return the results of all runs in the order of the tables."""
    return sorted(bench.results.values(), key=_order)


def _order(result: Result) -> tuple[Any, ...]:
    """By model size, cluster, job, rate (fastest first), strategy and folder, which ends with the repeat."""
    place = result.num_parameters > 1e8, result.num_local * result.num_nodes, result.num_nodes
    strategy = list(STRATEGIES).index(result.strategy)
    return *place, result.job, -(result.rate_bits_per_s or math.inf), strategy, result.output


def save(record: Record, results: list[Result]) -> None:
    """Write the rows and all runs, beside those of earlier commands, and draw the pictures."""
    results = [dataclasses.replace(result, output=Path(result.output).name) for result in results]
    new = {result_key(result) for result in results}
    kept = [old for old in map(Result.from_dict, record.known.get("results", [])) if result_key(old) not in new]
    results = sorted([*kept, *results], key=_order)
    record.save(
        more=[
            "Wire bytes of cache=host against FSDP2 with a true ring, by the formula; against HSDP they are equal "
            "everywhere. [docs/levels.png](../docs/levels.png) draws the bytes of each level.",
            picture.formula_table(),
            "Every run (of repeated ones, all):",
            tables(results),
            LEGEND,
        ],
        results=[result.to_dict() for result in results],
    )
    _DOCS.mkdir(exist_ok=True)
    picture.save(results, _DOCS / "levels.png")
    home = [result for result in results if (result.num_nodes, result.num_local) == (HOME.nodes, HOME.local)]
    shown = _of_whole_sets([result for result in home if result.num_parameters < 1e8])
    if shown:
        millions = max(result.num_parameters for result in shown) / 1e6
        cluster = f"{HOME.nodes} nodes x {HOME.local} ranks on {record.machine['cores']} cores"
        title = f"{cluster}, {millions:.1f} M parameters, fp32"
        save_plot(shown, _DOCS / "wire.png", title=title)


def tables(results: list[Result]) -> str:
    """Return a table for each cluster and model, with its title."""
    parts = []
    for _, group in itertools.groupby(results, key=lambda result: _order(result)[:3]):
        of_cluster = list(group)
        first = of_cluster[0]
        parts.append(
            f"{first.num_nodes} nodes x {first.num_local} ranks, {first.num_parameters / 1e6:.1f} M parameters:"
        )
        parts.append(render(of_cluster))
    return "\n\n".join(parts)


def _of_whole_sets(results: list[Result]) -> list[Result]:
    """One run of each case, fastest wire first, and only jobs and rates at which laconic and FSDP2 ran."""
    first: dict[tuple[Any, ...], Result] = {}
    for result in results:
        if result.strategy in ("fsdp2", "hsdp", "ddp", "host"):
            first.setdefault((result.job, result.rate_bits_per_s, result.strategy), result)
    whole = {key[:2] for key in first if all((*key[:2], name) in first for name in ("fsdp2", "host"))}
    return [result for key, result in first.items() if key[:2] in whole]


BENCHMARK.save = lambda record, bench: save(record, sorted_results(bench))
BENCHMARK.details = lambda bench: f"{tables(sorted_results(bench))}\n\n{LEGEND}"

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
