"""How much the cyclic schedule saves, how fast it is, and how well models train: every row of the claim.

    python -m benchmarks.cyclic                        all rows, some 40 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.cyclic --rows bytes,devices   some rows, recorded too
    python -m benchmarks.cyclic --quick                all rows on tiny jobs, printed only: does the method work?

Run rows with times (live, wall-clock, throughput, sharded) on a quiet machine. Accuracy takes most of the time.

[Note: Methods of the cyclic rows]
For live activations, messages and the wall-clock, the runtime runs stages that sleep for a known time, with one process
per worker on one machine; the stages count (sleeping.py). For the bytes of real models, one forward and backward of one
worker is traced, and the traces of all workers are added with their offsets in time (traces.py). For throughput, real
models train in the lab (throughput.py). For accuracy, one process plays all workers, which gives the same bits as N
processes (accuracy.py).
"""

from __future__ import annotations

import sys

from benchmarks.cyclic import devices, digits, language, schedule, throughput, traces
from benchmarks.cyclic.bench import prepare
from tests.support.measure import Benchmark

BENCHMARK = Benchmark(
    name="cyclic", doc=__doc__, prepare=prepare,
    rows={
        "live": schedule.live, "bytes": traces.traced_bytes, "messages": schedule.messages, "devices": devices.devices,
        "throughput": throughput.throughput, "sharded": throughput.sharded, "wall-clock": schedule.wall_clock,
        "digits": digits.digits, "language": language.language,
    },
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
