"""One run of a comparison: its job, its strategy and its rate, and the training configuration for them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laconic import registry
from laconic.config import Config, ConfigError, SyncConfig
from laconic.lab import format_rate
from laconic.registry import Strategy
from laconic.strategies.under import job_under

Job = Literal["full", "lora"]


STRATEGIES: Mapping[str, Strategy] = {name: each for name, each in registry.strategies().items() if each.in_compare}
"""The strategies that a comparison runs, by name: [Note: Registered strategies] in registry.py."""

WATCHED_STEP = 2
"""The step, counted from 1, whose memory is watched. In step 2 optimizer states exist, and caches are full."""

REFERENCE = "fsdp2"
"""The strategy with which the table compares the others."""

JOBS: dict[Job, str] = {"full": "full training", "lora": "LoRA"}
"""The label of each job for people."""


class ComparisonError(RuntimeError):
    """A run of the comparison failed; the message names the run and the reason."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a comparison.

    Raises: ValueError if the strategy is unknown or there are too few steps to time one.
    """

    strategy: str
    """A key of `STRATEGIES`, or another name of one."""
    job: Job = "full"
    """Training of all parameters (`full`), or of adapters on a frozen model (`lora`)."""
    rate_bits_per_s: float | None = None
    """The rate of every node's link; None does not limit it."""
    steps: int = 8
    """The number of optimizer steps, warm-up included."""
    measure_memory: bool = True
    """Whether to watch torch's allocator during the second step. A watched step is slow, so it is not timed."""
    save: bool = False
    """Whether the run ends with a checkpoint."""
    log_every: int = 1
    """The steps from one line of the run's log to the next. A line costs some 10 kB on the wire."""
    repeat: int = 0
    """The index of this run among equal runs; 0 for the first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", registry.canonical(self.strategy))
        if self.strategy not in STRATEGIES:
            raise ValueError(registry.unknown(self.strategy, STRATEGIES))
        if self.steps <= self.warmup_steps:
            raise ValueError(
                f"{self.steps} steps leave nothing to time after {self.warmup_steps} steps of warm-up; take at least "
                f"{self.warmup_steps + 1}"
            )

    @property
    def warmup_steps(self) -> int:
        """The number of steps that are not timed: the first, which allocates and fills caches, and the watched step."""
        return WATCHED_STEP if self.measure_memory else 1

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        name = f"{self.job}-{format_rate(self.rate_bits_per_s)}-{self.strategy}"
        return f"{name}-{self.repeat}" if self.repeat else name

    @property
    def label(self) -> str:
        """The run in words."""
        rate = format_rate(self.rate_bits_per_s)
        return f"{JOBS[self.job]}, {STRATEGIES[self.strategy].label}, {'unshaped' if rate == 'none' else rate}"


def config_of(base: Config, case: Case, out: Path) -> Config:
    """Return the training job of `case`: `base` under its strategy, without progress, resuming and evaluation.

    `out` is the folder of the comparison; it gets the tokens and the folder of the run.

    Raises: ConfigError if the strategy cannot run this job.
    """
    strategy = STRATEGIES[case.strategy]
    if strategy.has_islands:
        _check_islands(base.sync, case)
    try:
        job = job_under(strategy, base)
    except ConfigError as error:
        raise ConfigError(f"{strategy.label} cannot run this job: {error}") from error
    return dataclasses.replace(
        job,
        lora=dataclasses.replace(base.lora, enabled=case.job == "lora"),
        data=dataclasses.replace(base.data, cache=base.data.cache or str(out / "tokens")),
        train=dataclasses.replace(
            base.train,
            steps=case.steps, epochs=None, save_every=0 if case.save else -1, eval_every=0, log_every=case.log_every,
            resume="never",
            output=str(out / "runs" / case.name),
        ),
        log=dataclasses.replace(base.log, jsonl=True, memory_step=WATCHED_STEP if case.measure_memory else 0),
    )  # fmt: skip


def _check_islands(sync: SyncConfig, case: Case) -> None:
    label = STRATEGIES[case.strategy].label
    if not sync.is_local:
        raise ConfigError(
            f"{label} cannot run this job: its machines sync now and then, and sync.mode is 'every-step'; set "
            "sync.mode = 'local' and the keys of [sync]"
        )
    interval = sync.policy.schedule.interval
    if (case.steps - 1) % interval:
        raise ConfigError(
            f"{label}: {case.steps} steps do not hold whole rounds: a fragment is sent every {interval} steps, and the "
            f"steps after the first are measured; take {(case.steps - 1) // interval * interval + interval + 1}"
        )
