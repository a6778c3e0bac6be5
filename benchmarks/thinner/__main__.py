"""How many bytes, seconds and how much loss crossings in four bits cost and save: in the lab, on real engines.

    python -m benchmarks.thinner                           all rows, recorded in RESULTS.md
    python -m benchmarks.thinner --rows bytes,seconds      some rows, recorded too
    python -m benchmarks.thinner --quick                   all rows on a tiny job, printed only

Rows are measured on 2 nodes x 2 ranks; jobs/thinner.toml is the training job. FSDP2 has a true ring reduce-scatter, as
in benchmarks.wire. ZeRO++ is its algorithm on laconic's engine (ZERO_PLUS_PLUS in shard/wire.py): weights
cross in every forward and gradients in every micro-batch, as DeepSpeed's do.
"""

from __future__ import annotations

import sys

from benchmarks.thinner import costs, losses
from benchmarks.thinner.bench import Bench, open_bench
from laconic.compare.table import LEGEND, render
from tests.support.measure import Benchmark
from tests.support.record import Record


def _table(bench: Bench) -> str:
    return render(list(bench.results.values()))


def _save(record: Record, bench: Bench) -> None:
    record.save(more=["The runs of the latest command:", _table(bench), LEGEND])


BENCHMARK = Benchmark(
    name="thinner", doc=__doc__, prepare=open_bench,
    rows={
        "bytes": costs.wire_bytes_row, "accumulated": costs.accumulated, "seconds": costs.seconds,
        "against-hsdp": costs.against_hsdp, "unshaped": costs.unshaped, "memory": costs.memory,
        "paired": losses.paired, "stretch": losses.stretch, "optimizers": losses.optimizers, "scratch": losses.scratch,
    },
    save=_save, details=_table,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
