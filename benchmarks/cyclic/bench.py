"""The sizes of the jobs that the rows measure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.llama import Llama
from tests.support.measure import Benchmark

_LLAMA = Llama(
    hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=6, vocab=256, batch=4, sequence=128,
)  # fmt: skip
_TINY_LLAMA = dataclasses.replace(_LLAMA, hidden=96, intermediate=128, layers=4, sequence=32)
TIMEOUT_S = 900.0
"""The time limit of each launch of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the optimizer. With stale parameters, momentum narrows the range of learning rates that work."""

    lr: float
    momentum: float
    """The momentum of SGD, or Adam's first beta."""
    nesterov: bool = False
    """Whether momentum is Nesterov's; with Adam this is NAdam."""

    def __str__(self) -> str:
        return f"{self.lr:g} ({self.momentum:g}{', Nesterov' if self.nesterov else ''})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes of all jobs."""

    op_s: float
    """The seconds that a forward or a backward of a sleeping stage takes."""
    num_workers: tuple[int, ...]
    """The numbers of workers whose live activations are counted."""
    batches: int
    """The number of batches whose activations and messages are counted."""
    wall_batches: int
    """The number of batches whose wall-clock is measured."""
    llama: Llama
    """The model that is timed in the lab."""
    lab_steps: int
    """The number of timed steps of each run in the lab."""
    repeats: int
    """The number of runs of each strategy in the lab."""
    digits: dict[str, Any]
    """The arguments of `image_accuracy.digits_study`."""
    fashion: dict[str, Any]
    """The arguments of `image_accuracy.fashion_study`."""
    language: dict[str, Any]
    """The arguments of `accuracy.language_study`."""
    warm_up: dict[str, int]
    """Those that differ for runs with other beginnings: seeds and steps."""
    few_bits: dict[str, int]
    """Those that differ for runs in few bits: seeds and steps."""
    out: Path
    curves: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    """The losses of the row about beginnings: by rule and beginning, by seed, after each tenth of the steps."""


FULL = {
    "op_s": 0.08, "num_workers": (4, 8), "batches": 4, "wall_batches": 16, "llama": _LLAMA, "lab_steps": 8,
    "repeats": 3,
    "digits": {
        "seeds": 6, "tuning_seeds": 2, "epochs": 15,
        "settings": tuple(Setting(lr=lr, momentum=m) for lr, m in ((0.03, 0.9), (0.1, 0.9), (0.1, 0.5), (0.3, 0.5))),
    },
    "fashion": {
        "seeds": 5, "tuning_seeds": 1, "epochs": 4, "num_train": 8_000,
        "settings": tuple(Setting(lr=lr, momentum=m) for lr, m in ((0.05, 0.9), (0.02, 0.9), (0.05, 0.5), (0.1, 0.5))),
    },
    "language": {
        "seeds": 5, "tuning_seeds": 1, "plain_steps": 400, "steps": 1000,
        "settings": (
            Setting(lr=2e-3, momentum=0.9), Setting(lr=2e-3, momentum=0.95, nesterov=True),
            Setting(lr=3e-3, momentum=0.95, nesterov=True),
        ),
    },
    "warm_up": {"seeds": 3, "plain_steps": 0, "steps": 700},
    "few_bits": {"seeds": 3, "plain_steps": 400, "steps": 700},
}  # fmt: skip
QUICK = {
    "op_s": 0.03, "num_workers": (2, 3), "batches": 3, "wall_batches": 3, "llama": _TINY_LLAMA, "lab_steps": 2,
    "repeats": 1,
    "digits": {"seeds": 2, "tuning_seeds": 1, "epochs": 1, "settings": (Setting(lr=0.05, momentum=0.9),)},
    "fashion": {
        "seeds": 2, "tuning_seeds": 1, "epochs": 1, "num_train": 192,
        "settings": (Setting(lr=0.02, momentum=0.9),),
    },
    "language": {
        "seeds": 2, "tuning_seeds": 1, "plain_steps": 2, "steps": 4,
        "settings": (Setting(lr=3e-3, momentum=0.9, nesterov=True),),
    },
    "warm_up": {"seeds": 2, "plain_steps": 0, "steps": 10},
    "few_bits": {"seeds": 2, "plain_steps": 2, "steps": 4},
}  # fmt: skip

BENCHMARK = Benchmark(
    measures=("laconic.cyclic",),
    name="cyclic",
    prepare=lambda options: Bench(**(QUICK if options.quick else FULL), out=options.out),  # type: ignore[arg-type]
)
