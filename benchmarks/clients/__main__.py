"""laconic inside other trainers: the same numbers, how much of a script changes, and the speed on a slow wire.

    python -m benchmarks.clients                  all rows, some 15 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.clients --rows losses    some rows, recorded too
    python -m benchmarks.clients --quick          all rows on tiny jobs, printed only: does the method work?

Run rows with times (sft-lab) on a quiet machine.
"""

from __future__ import annotations

import sys

from benchmarks.clients import base, lines, losses, resume, sft
from benchmarks.clients.bench import prepare
from tests.support.measure import Benchmark

BENCHMARK = Benchmark(
    name="clients", doc=__doc__, prepare=prepare,
    rows={
        "lines": lines.lines, "losses": losses.losses, "resume": resume.resume, "base": base.base,
        "sft-lab": sft.sft_lab,
    },
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
