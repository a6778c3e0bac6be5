"""How much memory the cyclic schedule saves, and how well models train under its rules: every row of the claim.

    python -m benchmarks.cyclic                            all rows, recorded
    python -m benchmarks.cyclic --rows bytes,few-bits      some rows, recorded too
    python -m benchmarks.cyclic --quick                    all rows on tiny jobs, printed only: does the method work?

[Note: Methods of the cyclic rows]
For the bytes of real models, one forward and backward of one worker is traced, and the traces of all workers are added
with their offsets in time, which is the steady state of a run; and a run of many batches is metered on all workers, in
one process (traces.py). For accuracy, one process plays all workers, which gives the same bits as N
processes (accuracy.py). For few bits, the small Llama goes on from its plain steps on N processes that count what they
send (few_bits.py). The schedule itself, its messages and its devices are held by tests/cyclic. `laconic compare` has it
beside DDP and FSDP2.
"""

from __future__ import annotations

import sys

from benchmarks.cyclic import traces, accuracy, few_bits  # isort: skip  # noqa: F401  they register the rows
from benchmarks.cyclic.bench import BENCHMARK

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
