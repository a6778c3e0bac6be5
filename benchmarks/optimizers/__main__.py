"""The cost of optimizers that need whole blocks or whole matrices of a sharded model, and proof that they train alike.

    python -m benchmarks.optimizers                      all rows, some 15 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.optimizers --rows muon-bytes    some rows, recorded too
    python -m benchmarks.optimizers --quick              all rows on a tiny job, printed only: does the method work?

[Note: Bytes of an optimizer step]
The rows compare the bytes that all ranks receive in one optimizer step, over all levels, with the bytes of all matrices
in fp32. laconic counts its own bytes, with purpose "optimizer". For torch.optim.Muon on FSDP2, every functional
collective that DTensor issues counts as if it used its best algorithm (collective_bytes.py).
"""

from __future__ import annotations

import sys

from benchmarks.optimizers import muon, states, losses  # isort: skip  # noqa: F401  rows, in order
from benchmarks.optimizers.bench import BENCHMARK

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
