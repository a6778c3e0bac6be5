"""One run of a comparison: its job, its strategy and its rate, and the training configuration for them."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from laconic.config import Config, ConfigError, SyncConfig
from laconic.lab import format_rate

Job = Literal["full", "lora"]


class Strategy(NamedTuple):
    """A way to run the job of a comparison."""

    label: str
    """Its name for people."""
    shard: dict[str, Any]
    """Its keys in the section `[shard]`."""
    note: str
    """A line for readers of the report."""
    has_islands: bool = False
    """Whether machines sync now and then, by the job's section `[sync]`. The others sync in every step."""
    sync: Mapping[str, Any] = MappingProxyType({})
    """Its keys in the section `[sync]`, which take the place of the job's."""
    package: str | None = None
    """The package that it needs beside laconic, which is also the name of the extra that installs it."""

    @property
    def is_installed(self) -> bool:
        """Whether `package` can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


STRATEGIES: dict[str, Strategy] = {
    "fsdp2": Strategy(
        "FSDP2", {"strategy": "fsdp2"},
        "PyTorch's FSDP2 (ZeRO-3) with what NCCL gives it: a true ring reduce-scatter, and gathers that run ahead.",
    ),
    "fsdp2-gloo": Strategy(
        "FSDP2 on Gloo's own", {"strategy": "fsdp2-gloo"},
        "The same FSDP2 with Gloo's own collectives. Gloo runs a reduce-scatter as an all-reduce, which moves "
        "gradients twice, so four passes cross in place of three. And FSDP2 waits for every gather, as a CPU has no "
        "streams.",
    ),
    "fsdp2-hpz": Strategy(
        "FSDP2 hpZ", {"strategy": "fsdp2-hpz"},
        "FSDP2 with an integer for reshard_after_forward: after forward each node keeps a copy of the weights on its "
        "devices.",
    ),
    "hsdp": Strategy("HSDP", {"strategy": "hsdp"}, "FSDP2 inside each node; nodes are replicas, and keep all states."),
    "ddp": Strategy("DDP", {"strategy": "ddp"}, "PyTorch's DDP: every rank keeps everything."),
    "deepspeed": Strategy(
        "DeepSpeed ZeRO-3", {"strategy": "deepspeed"},
        "DeepSpeed's ZeRO-3, its sizes set for the model as FSDP2's are, and with the same ring reduce-scatter. What "
        "it has gathered ahead when forward ends, stays for backward, so its last layers cross once less.",
        package="deepspeed",
    ),
    "deepspeed-hpz": Strategy(
        "DeepSpeed hpZ", {"strategy": "deepspeed-hpz"},
        "DeepSpeed's ZeRO-3 with zero_hpz_partition_size: after forward each node keeps a copy of the weights on its "
        "devices.",
        package="deepspeed",
    ),
    "zero++": Strategy(
        "ZeRO++ on our engine", {"strategy": "zero++"},
        "ZeRO++'s algorithm on laconic's engine: weights cross in int8 in every forward, gradients in int4 in every "
        "backward. DeepSpeed's own runs on CUDA only.",
    ),
    "none": Strategy("laconic none", {"strategy": "laconic", "cache": "none"}, "laconic without a cache: ZeRO-3."),
    "host": Strategy(
        "laconic host", {"strategy": "laconic", "cache": "host"},
        "laconic: weights cross once, and rest in host memory until backward.",
    ),
    "device": Strategy(
        "laconic device", {"strategy": "laconic", "cache": "device"},
        "laconic: weights cross once, and stay on the device until backward.",
    ),
    "8bit": Strategy(
        "laconic 8bit", {"strategy": "laconic", "cache": "host", "wire": "8bit"},
        "laconic host with crossings in 8 bits. It trains with rounded weights and gradients.",
    ),
    "4bit": Strategy(
        "laconic 4bit", {"strategy": "laconic", "cache": "host", "wire": "4bit"},
        "laconic host with crossings in 4 bits. It trains with rounded weights and gradients.",
    ),
    "local": Strategy(
        "laconic local steps", {"strategy": "laconic", "cache": "host"},
        "laconic's local steps, as the job's [sync] says. Islands train apart between syncs, so losses differ.",
        has_islands=True,
    ),
    "local-fp32": Strategy(
        "laconic local fp32", {"strategy": "laconic", "cache": "host"},
        "laconic's local steps with exchanges in float32, beside torchft's.",
        has_islands=True, sync={"codec": "fp32", "error_feedback": False},
    ),
    "torchft-diloco": Strategy(
        "torchft DiLoCo", {"strategy": "torchft-diloco"},
        "torchft's DiLoCo over FSDP2 inside each island: the same steps, fragments and outer optimizer, in float32.",
        has_islands=True, sync={"codec": "fp32", "error_feedback": False}, package="torchft",
    ),
}  # fmt: skip

OWN_STRATEGIES = tuple(name for name, each in STRATEGIES.items() if each.shard["strategy"] == "laconic")
"""The strategies of laconic. The others are PyTorch's, DeepSpeed's and torchft's."""

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
    """A key of `STRATEGIES`."""
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
    """The steps from one line of the run's log and of its progress to the next. A line costs some 10 kB on the wire."""
    repeat: int = 0
    """The index of this run among equal runs; 0 for the first."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known; there are {', '.join(STRATEGIES)}")
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
        _check_islands(base, case)
    keys = {"device_budget_bytes": 0, "wire": None, **strategy.shard}
    if keys.get("cache") == "host":
        del keys["device_budget_bytes"]  # the host cache keeps the budget of the job; no other strategy may have one
    try:
        shard = dataclasses.replace(base.shard, **keys)
        sync = dataclasses.replace(base.sync, **strategy.sync) if strategy.has_islands else SyncConfig()
    except ConfigError as error:
        raise ConfigError(f"{strategy.label} cannot run this job: {error}") from error
    return dataclasses.replace(
        base,
        lora=dataclasses.replace(base.lora, enabled=case.job == "lora"),
        data=dataclasses.replace(base.data, cache=base.data.cache or str(out / "tokens")),
        shard=shard,
        sync=sync,
        train=dataclasses.replace(
            base.train,
            steps=case.steps, epochs=None, save_every=0 if case.save else -1, eval_every=0, log_every=case.log_every,
            resume="never",
            output=str(out / "runs" / case.name),
        ),
        log=dataclasses.replace(
            base.log, jsonl=True, progress=False, memory_step=WATCHED_STEP if case.measure_memory else 0
        ),
    )  # fmt: skip


def _check_islands(base: Config, case: Case) -> None:
    label, sync = STRATEGIES[case.strategy].label, base.sync
    if not sync.is_local:
        raise ConfigError(
            f"{label} cannot run this job: its machines sync now and then, and sync.mode is 'every-step'; set "
            "sync.mode = 'local' and the keys of [sync]"
        )
    interval = sync.every // sync.fragments
    if (case.steps - 1) % interval:
        raise ConfigError(
            f"{label}: {case.steps} steps do not hold whole rounds: a fragment is sent every {interval} steps, and the "
            f"steps after the first are measured; take {(case.steps - 1) // interval * interval + interval + 1}"
        )
