"""How much less crosses the wire, and how much time and memory that saves: every row of the claim, in the lab.

    python -m benchmarks.wire                            all rows, some 20 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.wire --rows wire-full,losses    some rows, recorded too
    python -m benchmarks.wire --quick                    all rows on a tiny job, printed only: does the method work?

Run this on a quiet machine. The lab has 2 nodes x 2 ranks; jobs/wire.toml is the training job, in full and with LoRA.

[Note: Steps that count]
The network interface counts the bytes, per node and step. A row uses the mean over the steps from the second on, which
leaves out initialisation. Times are the median over the timed steps of a run. No machine is equally fast at all times.
So where both sides of a ratio take less than a second per step, runs alternate several times. The row then compares the
medians over runs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Benchmark
from benchmarks.record import Record
from benchmarks.wire import memory, seconds, traffic
from benchmarks.wire.bench import LOCAL, NODES, Bench, open_bench
from laconic.compare import STRATEGIES, Result
from laconic.compare.plot import save_plot
from laconic.compare.table import LEGEND, render

PICTURE = Path(__file__).parents[2] / "docs" / "wire.png"


def sorted_results(bench: Bench) -> list[Result]:
    """Return the results by job, rate (fastest first), strategy and repeat."""

    def order(item: tuple[tuple[Any, ...], Result]) -> tuple[Any, ...]:
        job, rate_bits_per_s, strategy, repeat = item[0]
        return job, -(rate_bits_per_s or math.inf), list(STRATEGIES).index(strategy), repeat

    return [result for _, result in sorted(bench.results.items(), key=order)]


def save(record: Record, results: list[Result]) -> None:
    """Write the rows and all runs, together with the runs of earlier commands, and draw the picture."""
    results = [dataclasses.replace(result, output=Path(result.output).name) for result in results]
    new = {_identity(result) for result in results}
    kept = [old for old in map(Result.from_dict, record.known.get("results", [])) if _identity(old) not in new]
    results = [*kept, *results]
    record.save(
        about=f"{NODES} nodes x {LOCAL} ranks; ",
        more=["Every run; repeated runs have several lines:", render(results), LEGEND],
        results=[result.to_dict() for result in results],
    )
    PICTURE.parent.mkdir(exist_ok=True)
    shown = [result for result in _first_of_each_pair(results) if result.strategy in ("fsdp2", "host")]
    millions = max(result.num_parameters for result in results) / 1e6
    title = f"{NODES} nodes x {LOCAL} ranks on {record.machine['cores']} cores, {millions:.1f} M parameters, fp32"
    save_plot(shown, PICTURE, title=title)


def _identity(result: Result) -> tuple[Any, ...]:
    return result.output, result.job, result.strategy, result.rate_bits_per_s


def _first_of_each_pair(results: list[Result]) -> list[Result]:
    """One run of each case, fastest wire first, and only rates at which both strategies ran."""
    first: dict[tuple[Any, ...], Result] = {}
    for result in results:
        first.setdefault((result.job, result.rate_bits_per_s, result.strategy), result)
    pairs = {key[:2] for key in first if all((*key[:2], name) in first for name in ("fsdp2", "host"))}
    chosen = [result for key, result in first.items() if key[:2] in pairs]
    return sorted(chosen, key=lambda result: (result.job, -(result.rate_bits_per_s or math.inf)))


BENCHMARK = Benchmark(
    name="wire", doc=__doc__, prepare=open_bench,
    rows={
        "wire-full": traffic.wire_full, "wire-lora": traffic.wire_lora, "counted": traffic.counted,
        "time-full": seconds.time_full, "time-lora": seconds.time_lora, "lora-rate": seconds.lora_rate,
        "overlap": seconds.overlap, "unshaped": seconds.unshaped, "device-memory": memory.device_memory,
        "host-memory": memory.host_memory, "losses": traffic.losses,
    },
    save=lambda record, bench: save(record, sorted_results(bench)),
    details=lambda bench: f"{render(sorted_results(bench))}\n\n{LEGEND}",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
