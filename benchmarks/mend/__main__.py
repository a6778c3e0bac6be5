"""Classes of defects that were mended: every member of each class tried, and the harm counted.

python -m benchmarks.mend                       all rows, recorded in RESULTS.md
python -m benchmarks.mend --rows kernel-paths   some rows, recorded too
python -m benchmarks.mend --quick               a small fixed sample of each, printed only

A row is the function `row` of one module. The tests run a small fixed sample of the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from benchmarks.measure import Benchmark
from benchmarks.mend import accelerate_scripts, forged, kept, kernel_paths, kills, ranks_differ, sigterm, wrong_key
from benchmarks.record import Row
from benchmarks.trust.bench import Bench, open_bench

ROWS: Mapping[str, Callable[[Bench], Row]] = {
    # in the order of the table
    "kernel-paths": kernel_paths.row,
    "kept": kept.row,
    "ranks-differ": ranks_differ.row,
    "forged": forged.row,
    "sigterm": sigterm.row,
    "kills": kills.row,
    "wrong-key": wrong_key.row,
    "accelerate-scripts": accelerate_scripts.row,
}

BENCHMARK = Benchmark(name="mend", doc=__doc__, prepare=open_bench, rows=ROWS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
