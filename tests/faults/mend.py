"""Classes of defects that were mended: every member of each class tried, and the harm counted.

python -m tests.faults.mend                       all rows, recorded in RESULTS.md
python -m tests.faults.mend --rows kernel-paths   some rows, recorded too
python -m tests.faults.mend --quick               a small fixed sample of each, printed only

A row is the function `row` of one module. The tests run a small fixed sample of the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from tests.faults import (
    accelerate_scripts,
    forged,
    kept,
    kernel_paths,
    kills_of_islands,
    ranks_differ,
    sigterm,
    wrong_key,
)
from tests.faults.bench import Bench, open_bench
from tests.support.measure import Benchmark
from tests.support.record import Row

ROWS: Mapping[str, Callable[[Bench], Row]] = {
    # in the order of the table
    "kernel-paths": kernel_paths.row,
    "kept": kept.row,
    "ranks-differ": ranks_differ.row,
    "forged": forged.row,
    "sigterm": sigterm.row,
    "kills": kills_of_islands.row,
    "wrong-key": wrong_key.row,
    "accelerate-scripts": accelerate_scripts.row,
}

BENCHMARK = Benchmark(name="mend", module="tests.faults.mend", doc=__doc__, prepare=open_bench, rows=ROWS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
