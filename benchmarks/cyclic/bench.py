"""The sizes of the jobs that the rows measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.measure import Benchmark


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the optimizer. With stale parameters, momentum narrows the range of learning rates that work."""

    lr: float
    momentum: float
    """Adam's first beta, or the momentum of SGD."""
    nesterov: bool = False
    """Whether momentum is Nesterov's; with Adam this is NAdam."""

    def __str__(self) -> str:
        return f"{self.lr:g} ({self.momentum:g}{', Nesterov' if self.nesterov else ''})"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes of all jobs."""

    language: dict[str, Any]
    """The arguments of `accuracy.Language`."""
    resnet: dict[str, Any]
    """Those of `accuracy.Images` for ResNet-50's layers."""
    vit: dict[str, Any]
    """The same for a ViT."""
    batches: int
    """The batches of a run whose activations are metered."""
    few_bits: dict[str, int]
    """Those that differ for runs in few bits: seeds and steps."""
    out: Path


FULL: dict[str, Any] = {
    "language": {
        "seeds": 5, "tuning_seeds": 1, "plain_steps": 400, "steps": 1000,
        "settings": (
            Setting(lr=2e-3, momentum=0.9), Setting(lr=2e-3, momentum=0.95, nesterov=True),
            Setting(lr=3e-3, momentum=0.95, nesterov=True),
        ),
    },
    "resnet": {
        "is_vit": False, "seeds": 5, "tuning_seeds": 1, "plain_steps": 0, "steps": 240, "rows": 16,
        "settings": tuple(
            Setting(lr=lr, momentum=m) for lr, m in ((0.05, 0.9), (0.05, 0.5), (0.1, 0.5), (0.2, 0.0))
        ),
    },
    "vit": {
        "is_vit": True, "seeds": 5, "tuning_seeds": 1, "plain_steps": 160, "steps": 480, "rows": 16,
        "settings": tuple(
            Setting(lr=lr, momentum=m) for lr, m in ((2e-3, 0.9), (5e-3, 0.9), (5e-3, 0.5), (1e-2, 0.5))
        ),
    },
    "batches": 64,
    "few_bits": {"seeds": 3, "plain_steps": 400, "steps": 700},
}  # fmt: skip
QUICK: dict[str, Any] = {
    "language": {
        "seeds": 2, "tuning_seeds": 1, "plain_steps": 2, "steps": 4,
        "settings": (Setting(lr=3e-3, momentum=0.9, nesterov=True),),
    },
    **{
        name: {
            "is_vit": name == "vit", "seeds": 2, "tuning_seeds": 1, "plain_steps": 2, "steps": 4, "rows": 2,
            "settings": (Setting(lr=3e-3, momentum=0.9),),
        }
        for name in ("resnet", "vit")
    },
    "batches": 6,
    "few_bits": {"seeds": 2, "plain_steps": 2, "steps": 4},
}  # fmt: skip

BENCHMARK = Benchmark(
    measures=("laconic.cyclic",),
    name="cyclic",
    prepare=lambda options: Bench(**(QUICK if options.quick else FULL), out=options.out),
)
