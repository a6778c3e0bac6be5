"""The planner's predictions beside measurements: bytes, memory, seconds, and what it recommends.

    python -m benchmarks.plan                              all rows, recorded
    python -m benchmarks.plan --rows bytes-interface       some rows, recorded too
    python -m benchmarks.plan --quick                      all rows on a few jobs, printed only

The figures of the cluster are measured once, before any run, and never fitted to the runs.
"""

from __future__ import annotations

import sys

from benchmarks.plan import fits, memory, pipelines, scale, seconds
from benchmarks.plan.bench import Bench, open_bench
from tests.support.measure import Benchmark
from tests.support.record import Record


def _details(bench: Bench) -> str:
    return "\n\n".join(table.markdown() for table in bench.tables.values())


def _save(record: Record, bench: Bench) -> None:
    record.save(bench.tables)


BENCHMARK = Benchmark(
    measures=("laconic.plan", "laconic.rehearse", "laconic.shard"),
    name="plan",
    prepare=open_bench,
    rows={
        "bytes-interface": seconds.interface, "memory": memory.row, "seconds": seconds.seconds, "best": seconds.best,
        "pipelines": pipelines.row, "fits": fits.row, "scale": scale.row, "scale-8b": scale.row_8b,
    },
    save=_save,
    details=_details,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
