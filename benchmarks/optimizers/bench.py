"""The sizes that the rows share, and the launch of their ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.llama import Llama
from tests.support.launch import launch
from tests.support.measure import Benchmark, Options

NODES, LOCAL = 2, 2
LAST_STEPS = 20
"""The number of steps at the end of a run whose mean loss the rows compare."""
MIX = Llama(hidden=512, intermediate=1408, layers=2, heads=8, kv_heads=2, vocab=512, batch=1, sequence=8)
TINY_MIX = dataclasses.replace(MIX, hidden=64, intermediate=176, vocab=64)
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The model and the lengths of the runs."""

    mix: Llama
    loss_steps: int
    loss_seeds: int
    rank_steps: int
    out: Path

    def on_ranks(self, function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
        """Run a measurement of `mix` on 2 nodes x 2 ranks, and return the result of rank 0."""
        return launch(function, self.mix, *args, num_ranks=NODES * LOCAL, num_local=LOCAL, timeout_s=TIMEOUT_S)[0]


def _prepare(options: Options) -> Bench:
    quick = options.quick
    return Bench(
        mix=TINY_MIX if quick else MIX,
        loss_steps=LAST_STEPS if quick else 300,
        loss_seeds=1 if quick else 6,
        rank_steps=4 if quick else 40,
        out=options.out,
    )


BENCHMARK = Benchmark(name="optimizers", prepare=_prepare)


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's value."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
