"""How much traffic local steps save, and how much quality they cost: every row of the claim.

    python -m benchmarks.local_steps                        all rows, some 90 minutes on 2 cores, recorded
    python -m benchmarks.local_steps --rows bytes,flops     some rows, recorded too
    python -m benchmarks.local_steps --quick                all rows on tiny jobs, printed only: does the method work?

Four islands of one rank each train a Llama over bytes on the trainer's corpus (islands.py); for the rows about slices
eight and sixteen islands, with `--size`, `--seeds` and `--device` (slices.py). Other work of the machine changes no row
but `slices-time`.

[Note: Equal tokens]
All runs of a seed take the same rows in the same steps. With islands, each island sees its part of the rows; every-step
data parallel averages the gradients of all these rows. All runs start from the same weights, which every-step data
parallel has trained, and follow the rest of one schedule of the learning rate. At the beginning of training, a model of
this size learns something new with every batch. Islands would learn different things, and the average of their weights
would lose a large part of their progress. The islands of DiLoCo's paper also begin after a quarter of its steps.
"""

from __future__ import annotations

import sys

from benchmarks.local_steps import losses, slices, traffic, partial  # isort: skip  # noqa: F401  rows, in order
from benchmarks.local_steps.bench import BENCHMARK

BENCHMARK.save = losses.save

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
