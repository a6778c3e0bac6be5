"""The sizes of the jobs that the rows measure."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.llama import Llama
from tests.support.measure import Benchmark, Options

_LLAMA = Llama(
    hidden=512, intermediate=1408, layers=6, heads=8, kv_heads=4, vocab=258, batch=1, sequence=128,
)  # fmt: skip
_TINY_LLAMA = dataclasses.replace(_LLAMA, hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, sequence=32)
TIMEOUT_S = 900.0
"""The time limit of each launch of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes of all jobs."""

    llama: Llama
    """The model that is fine-tuned in the lab."""
    lab_steps: int
    """The number of timed steps of each run in the lab."""
    pairs: int
    """The number of pairs of runs in the lab, on a slow wire and on an unshaped one."""
    steps: int
    """The number of steps whose losses are compared."""
    worlds: tuple[int, ...]
    """The numbers of ranks whose losses are compared."""
    out: Path


def _prepare(options: Options) -> Bench:
    if options.quick:
        return Bench(llama=_TINY_LLAMA, lab_steps=2, pairs=1, steps=4, worlds=(2,), out=options.out)
    return Bench(llama=_LLAMA, lab_steps=8, pairs=7, steps=30, worlds=(2, 4), out=options.out)


BENCHMARK = Benchmark(name="clients", prepare=_prepare)
