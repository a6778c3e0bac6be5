"""How many bytes, seconds and how much loss crossings in four bits cost and save: in the lab, on real engines.

    python -m benchmarks.thinner                           all rows, recorded in RESULTS.md
    python -m benchmarks.thinner --rows bytes,seconds      some rows, recorded too
    python -m benchmarks.thinner --quick                   all rows on a tiny job, printed only

Rows are measured on 2 nodes x 2 ranks; jobs/thinner.toml is the training job. FSDP2 has a true ring reduce-scatter, as
in benchmarks.wire. ZeRO++ is its algorithm on laconic's engine (ZERO_PLUS_PLUS in shard/wire.py): weights
cross in every forward and gradients in every micro-batch, as DeepSpeed's do.
"""

from __future__ import annotations

import sys

from benchmarks.thinner import costs, losses  # isort: skip  # noqa: F401  they register the rows, in this order
from benchmarks.thinner.bench import BENCHMARK

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
