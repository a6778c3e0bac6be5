"""What is run: a job, a strategy and a rate, and the training configuration that they amount to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from laconic.config.job import Config, ConfigError
from laconic.lab import format_rate

Job = Literal["full", "lora"]

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("FSDP2", {"strategy": "fsdp2"}),
    "fsdp2-hpz": ("FSDP2 hpZ", {"strategy": "fsdp2-hpz"}),
    "hsdp": ("HSDP", {"strategy": "hsdp"}),
    "ddp": ("DDP", {"strategy": "ddp"}),
    "none": ("laconic none", {"strategy": "laconic", "cache": "none"}),
    "host": ("laconic host", {"strategy": "laconic", "cache": "host"}),
    "device": ("laconic device", {"strategy": "laconic", "cache": "device"}),
}
"""Name -> (what people read, the keys of `[shard]`)."""

WATCHED_STEP = 2
"""Counted from 1. The first that has optimizer states and, with frozen weights, a filled cache."""

REFERENCE = "fsdp2"
"""What the others are compared with."""

JOBS: dict[Job, str] = {"full": "full training", "lora": "LoRA"}


class ComparisonError(RuntimeError):
    """A run of the comparison failed; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    strategy: str
    """A key of `STRATEGIES`."""
    job: Job = "full"
    """All parameters, or adapters on a frozen model."""
    rate_bits_per_s: float | None = None
    """Of every node's link; None: not limited."""
    steps: int = 8
    """Optimizer steps, warm-up included."""
    measure_memory: bool = True
    """Have torch's allocator watched during the second step, which is then no use for timing."""
    save: bool = False
    """End with a checkpoint."""
    log_every: int = 1
    """Steps between two lines of the run's log, and so of progress. Collecting a line's figures takes some 10 kB."""
    repeat: int = 0
    """Which of several equal runs."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known; there are {', '.join(STRATEGIES)}")
        if self.steps <= self.warmup_steps:
            raise ValueError(
                f"{self.steps} steps leave nothing to time after {self.warmup_steps} of warm-up; take at least "
                f"{self.warmup_steps + 1}"
            )

    @property
    def warmup_steps(self) -> int:
        """Steps that are not timed: the first, which allocates and gathers for the first time, and the watched one."""
        return WATCHED_STEP if self.measure_memory else 1

    @property
    def name(self) -> str:
        """Of the folder of the run."""
        parts = [
            self.job,
            format_rate(self.rate_bits_per_s),
            self.strategy,
            *([str(self.repeat)] if self.repeat else []),
        ]
        return "-".join(parts)

    @property
    def label(self) -> str:
        """For people."""
        rate = format_rate(self.rate_bits_per_s)
        return f"{JOBS[self.job]}, {STRATEGIES[self.strategy][0]}, {'unshaped' if rate == 'none' else rate}"


def config_of(base: Config, case: Case, out: Path) -> Config:
    """The training job of `case`: `base` but for the strategy, and quiet.

    Raises: ConfigError if the strategy cannot run this job.
    """
    try:
        shard = dataclasses.replace(base.shard, **_fitting(base, STRATEGIES[case.strategy][1]))
    except ConfigError as error:
        raise ConfigError(f"{STRATEGIES[case.strategy][0]} cannot run this job: {error}") from error
    return dataclasses.replace(
        base,
        lora=dataclasses.replace(base.lora, enabled=case.job == "lora"),
        data=dataclasses.replace(base.data, cache=base.data.cache or str(out / "tokens")),
        shard=shard,
        train=dataclasses.replace(
            base.train,
            steps=case.steps, save_every=0 if case.save else -1, eval_every=0, log_every=case.log_every, resume=False,
            output=str(out / "runs" / case.name),
        ),
        log=dataclasses.replace(
            base.log, jsonl=True, progress=False, memory_step=WATCHED_STEP if case.measure_memory else 0
        ),
    )  # fmt: skip


def _fitting(base: Config, keys: dict[str, Any]) -> dict[str, Any]:
    """`keys`, without a budget that only the host cache has."""
    return keys if keys.get("cache") == "host" else {**keys, "device_budget_bytes": 0}
