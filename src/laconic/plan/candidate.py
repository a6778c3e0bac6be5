"""A strategy that the planner can predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laconic.config import Config
from laconic.plan.buckets import Shape
from laconic.plan.machine import Machine
from laconic.plan.program import Program, Work

Make = Callable[[Machine, Config, Work, Shape], Program]
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
    keys: Mapping[str, Any] | None = field(default_factory=dict)
    """The keys of `[shard]` with which `laconic train` runs it; None if it does not."""
    is_peer: bool = False

    def job(self, config: Config) -> Config:
        """The job under this strategy.

        Raises:
            ConfigError: the strategy cannot run the job.
        """
        keys: dict[str, Any] = {"cache": "host", "wire": None, **(self.keys or {"strategy": "fsdp2"})}
        if keys["strategy"] != "laconic":  # these keys are for laconic alone
            keys |= {"check_every": 0, "on_damage": "raise", "audit_every": 0}
        return dataclasses.replace(config, shard=dataclasses.replace(config.shard, device_budget_bytes=0, **keys))
