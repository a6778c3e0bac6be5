"""The engine on a CUDA device: one GPU is enough. All rows take less than 10 minutes on an H200.

    python -m benchmarks.gpu                                   all rows, recorded in RESULTS.md
    python -m benchmarks.gpu --rows step-plain,overlap-alone   some rows, recorded too
    python -m benchmarks.gpu --quick                           all rows at toy size, printed only; without a GPU on CPU

The rows of `step` have one rank on NCCL, against plain PyTorch and FSDP2. The rows of `memory` have four ranks that
share the GPU over Gloo. The rows of `overlap` read the copies to and from host memory in the profiler's trace. The rows
of `loss` train the same model on CPU and on CUDA.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial

import torch

from benchmarks.gpu import memory, overlap, training
from benchmarks.gpu.training import FULL, TOY, Bench
from tests.support.measure import Benchmark, BenchmarkError, Options
from tests.support.record import Record


def _prepare(options: Options) -> contextlib.nullcontext[Bench]:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or options.quick):
        raise BenchmarkError("torch finds no CUDA device here; --quick tries the rows at toy size on CPU")
    return contextlib.nullcontext(Bench(TOY if options.quick else FULL, "cuda" if has_gpu else "cpu"))


def save(record: Record, bench: Bench) -> None:
    """Write the rows with the name of the GPU."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    record.save(about=f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}; ")


BENCHMARK = Benchmark(
    name="gpu", doc=__doc__, prepare=_prepare,
    rows={
        "step-plain": training.step_plain, "step-fsdp2": training.step_fsdp2,
        "memory-host": memory.memory_host, "memory-device": memory.memory_device,
        "memory-fsdp2": memory.memory_fsdp2, "overlap-alone": overlap.overlap_alone,
        "overlap-gloo": overlap.overlap_gloo,
        **{f"loss-{cache}": partial(training.loss, cache=cache) for cache in training.CACHES},
    },
    save=save,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
