"""A strategy that the planner can predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laconic.config import Config, ScheduleConfig, SyncConfig
from laconic.plan.buckets import Shape
from laconic.plan.machine import Machine
from laconic.plan.program import Program, StepWork

Make = Callable[[Machine, Config, StepWork, Shape], Program]
"""Makes the program of a strategy: from an idle machine, the job under this strategy, its work and its ranks."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy that the planner can predict."""

    name: str
    label: str
    """The name for people."""
    make: Make
    source: str
    """Where its algorithm is published."""
    keys: Mapping[str, Any] | None
    """The keys of `[shard]` with which `laconic train` runs it; None if it does not: see `can_train`."""
    is_peer: bool = False
    inexact: str = ""
    """The difference from ZeRO-3's training, and the measured cost in quality; empty if both train the same."""
    sync: Mapping[str, Any] | None = None
    """The keys of `[sync]` for islands, where the job has none of its own; None for every-step training."""
    schedule: Mapping[str, Any] | None = None
    """The keys of `[schedule]` for the cyclic schedule; None for ranks that run at the same time."""

    @property
    def can_train(self) -> bool:
        """True if `laconic train` runs the strategy. The planner predicts the others, but never recommends them."""
        return self.keys is not None

    def job(self, config: Config) -> Config:
        """The job under this strategy. One that `laconic train` does not run gets the keys of FSDP2.

        Raises:
            ConfigError: the strategy cannot run the job.
        """
        own: Mapping[str, Any] = {"strategy": "fsdp2"} if self.keys is None else self.keys
        keys: dict[str, Any] = {"cache": "host", "wire": None, **own}
        if keys["strategy"] != "laconic":  # these keys are for laconic alone
            keys |= {"check_every": 0, "on_damage": "raise", "audit_every": 0}
        sync, schedule = SyncConfig(), ScheduleConfig()
        if self.sync is not None:
            sync = config.sync if config.sync.is_local else SyncConfig(mode="local")
            sync = dataclasses.replace(sync, **self.sync)
        if self.schedule is not None:
            schedule = config.schedule if config.schedule.is_cyclic else ScheduleConfig(kind="cyclic")
            schedule = dataclasses.replace(schedule, **self.schedule)
        shard = dataclasses.replace(config.shard, **{"device_budget_bytes": 0, "cluster": None, **keys})
        return dataclasses.replace(config, shard=shard, sync=sync, schedule=schedule)

    def is_asked_for(self, config: Config) -> bool:
        """Whether the job itself has chosen what makes this strategy inexact."""
        if self.sync is not None or self.schedule is not None:
            has_sync = self.sync is not None and config.sync.is_local
            return has_sync or (self.schedule is not None and config.schedule.is_cyclic)
        own = self.keys or {}
        return own.get("wire") is not None and config.shard.wire == own["wire"]
