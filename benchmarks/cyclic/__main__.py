"""How much the cyclic schedule saves, how fast it is, and how well models train: every row of the claim.

    python -m benchmarks.cyclic                        all rows, some 40 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.cyclic --rows bytes,devices   some rows, recorded too
    python -m benchmarks.cyclic --quick                all rows on tiny jobs, printed only: does the method work?

Run rows with times (live, wall-clock, throughput, sharded) on a quiet machine. Accuracy takes most of the time.

[Note: Methods of the cyclic rows]
For live activations, messages and the wall-clock, the runtime runs stages that sleep for a known time, with one
process per worker on one machine; the stages count (schedule.py). For the bytes of real models, one forward and
backward of one worker is traced, and the traces of all workers are added with their offsets in time (traces.py). On
one device, image models are run under a meter (one_device.py). For throughput, real models train in the lab
(throughput.py). For accuracy, one process plays all workers, which gives the same bits as N processes (accuracy.py,
image_accuracy.py, and warm_up.py for ways to begin). For few bits, the small Llama goes on from its plain steps on N
processes that count what they send (few_bits.py).
"""

from __future__ import annotations

import sys

from benchmarks.cyclic import schedule, traces, one_device, throughput, image_accuracy, accuracy, warm_up, few_bits  # isort: skip  # noqa: F401
from benchmarks.cyclic.bench import BENCHMARK

BENCHMARK.save = warm_up.save

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
