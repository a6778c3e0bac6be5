"""laconic inside other trainers: the same numbers, how much of a script changes, and the speed on a slow wire.

    python -m benchmarks.clients                  all rows, some 15 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.clients --rows losses    some rows, recorded too
    python -m benchmarks.clients --quick          all rows on tiny jobs, printed only: does the method work?

Run rows with times (sft-lab) on a quiet machine.
"""

from __future__ import annotations

import sys

from benchmarks.clients import lines, losses, resume, base, sft  # isort: skip  # noqa: F401  rows, in order
from benchmarks.clients.bench import BENCHMARK

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
