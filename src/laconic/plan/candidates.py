"""The strategies that the planner knows: laconic's own, and its peers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laconic.config import Config
from laconic.plan.buckets import Shape
from laconic.plan.engine import EngineOptions
from laconic.plan.machine import Machine
from laconic.plan.program import LaconicStep, LocalStepsProgram, Program, Work
from laconic.shard.cache import Cache

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
        keys = dict(self.keys or {"strategy": "fsdp2", "cache": "host", "wire": None})
        return dataclasses.replace(config, shard=dataclasses.replace(config.shard, device_budget_bytes=0, **keys))


def _laconic(machine: Machine, config: Config, work: Work, shape: Shape) -> Program:
    cache = Cache(where=config.shard.cache, device_budget_bytes=config.shard.device_budget_bytes)
    if config.sync.is_local:
        return LocalStepsProgram(machine, work, shape, cache, config.sync)
    return LaconicStep(machine, work, shape, EngineOptions(sharding=work.sharding, cache=cache))


def _zero_plus_plus(machine: Machine, config: Config, work: Work, shape: Shape) -> Program:
    options = EngineOptions(sharding=work.sharding, cache=Cache(where="device"), syncs_always=True)
    return LaconicStep(machine, work, shape, options)


def _own(name: str, label: str, source: str, **keys: Any) -> Candidate:
    return Candidate(
        name=name, label=f"laconic {label}", make=_laconic, source=source,
        keys={"strategy": "laconic", "cache": "host", "wire": None, **keys},
    )  # fmt: skip


CANDIDATES: dict[str, Candidate] = {
    each.name: each
    for each in (
        _own("none", "none", "ZeRO-3, arXiv 1910.02054", cache="none"),
        _own("host", "host", "FCDP, arXiv 2602.06499"),
        _own("device", "device", "hpZ of ZeRO++, arXiv 2306.10209, section 4.2", cache="device"),
        _own("8bit", "8bit", "SDP4Bit, arXiv 2410.15526, in eight bits", wire="8bit"),
        _own("4bit", "4bit", "SDP4Bit, arXiv 2410.15526", wire="4bit"),
        Candidate(
            name="zero++", label="ZeRO++ on our engine", make=_zero_plus_plus, is_peer=True,
            source="ZeRO++, arXiv 2306.10209", keys={"strategy": "zero++", "cache": "host", "wire": None},
        ),
    )
}  # fmt: skip
"""All strategies, by name."""
