"""Steps of published models on nodes of eight H100, simulated: no GPU has taken them.

    python -m benchmarks.simulated                              all rows, recorded in RESULTS.md
    python -m benchmarks.simulated --rows simulated-8b          some rows, recorded too
    python -m benchmarks.simulated --out runs/simulated         the same, and pictures of steps in that folder
    python -m benchmarks.simulated --quick                      all rows on one job, printed only

Each strategy's own code runs in a rehearsal, torch's FSDP2 and HSDP too. The figures of the cluster are in cluster.py.
"""

from __future__ import annotations

import sys

from benchmarks.simulated import grid, h100
from benchmarks.simulated.grid import (
    MEASURES,
    Bench,
    cells_of,
    code_of_cells,
    data_of,
    figures_table,
    grid_tables,
    open_bench,
)
from tests.support.measure import Benchmark
from tests.support.record import Record


def _details(bench: Bench) -> str:
    return grid_tables(bench.grid) if bench.grid else ""


def _save(record: Record, bench: Bench) -> None:
    """Write the record. The tables are those of the last grid, which a run of other rows leaves as it is."""
    known = record.known
    cells, code = (bench.grid, code_of_cells()) if bench.grid else (
        cells_of(known.get("cells", [])), known.get("cells_code", ""),
    )  # fmt: skip
    more = [f"The cluster's figures, of which none is from a step of ours:\n\n{figures_table()}"]
    record.save(more=[*more, grid_tables(cells)] if cells else more, cells=data_of(cells), cells_code=code)


BENCHMARK = Benchmark(measures=MEASURES,
    name="simulated", prepare=open_bench, save=_save, details=_details,
    rows={"simulated-8b": grid.row_8b, "simulated-grid": grid.row_grid, "simulated-h100": h100.row},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
