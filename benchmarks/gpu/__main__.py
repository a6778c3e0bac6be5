"""The engine on a CUDA device: one GPU is enough. All rows take less than 10 minutes on an H200.

    python -m benchmarks.gpu                                   all rows, recorded
    python -m benchmarks.gpu --rows step-plain,overlap-alone   some rows, recorded too
    python -m benchmarks.gpu --quick                           all rows at toy size, printed only; without a GPU on CPU

`python -m benchmarks.gpu.report` runs the CUDA tests, too, and writes a report.

The rows of `step` have one rank on NCCL, against plain PyTorch and FSDP2. The rows of `memory` have four ranks that
share the GPU over Gloo. The rows of `publish` have one rank. The rows of `overlap` read the copies to and from host
memory in the profiler's trace. The rows of `loss` train the same model on CPU and on CUDA.
"""

from __future__ import annotations

import sys

from benchmarks.gpu import training, peers, kernels, policies, memory, publish, overlap  # isort: skip  # noqa: F401  they register the rows, in this order
from benchmarks.gpu.training import BENCHMARK

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
