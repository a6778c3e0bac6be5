"""Steps of published models on nodes of eight H100, simulated: no GPU has taken them.

    python -m benchmarks.simulated                              all rows, recorded
    python -m benchmarks.simulated --rows simulated-8b          some rows, recorded too
    python -m benchmarks.simulated --out runs/simulated         the same, and pictures of steps in that folder
    python -m benchmarks.simulated --quick                      all rows on one job, printed only

Each strategy's own code runs in a rehearsal, torch's FSDP2 and HSDP too. The figures of the cluster are in cluster.py.
"""

from __future__ import annotations

import sys

from benchmarks.simulated import grid, h100
from benchmarks.simulated.grid import Bench, figures_table
from tests.support.measure import Benchmark
from tests.support.record import Record


def _save(record: Record, bench: Bench) -> None:
    record.save({"cluster": figures_table(), **bench.tables})


BENCHMARK = Benchmark(
    measures=("laconic.plan", "laconic.rehearse", "laconic.shard"),
    name="simulated",
    prepare=lambda options: Bench(options.out, quick=options.quick, keeps=options.keeps),
    save=_save,
    details=lambda bench: "\n\n".join(table.markdown() for table in bench.tables.values()),
    rows={"simulated-8b": grid.row_8b, "simulated-grid": grid.row_grid, "simulated-h100": h100.row},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
