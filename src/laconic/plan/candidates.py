"""The strategies that the planner knows: laconic's own, and its peers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from laconic.config import Config, ConfigError, ShardConfig
from laconic.plan.buckets import Shape
from laconic.plan.candidate import Candidate
from laconic.plan.cyclic import CyclicProgram
from laconic.plan.engine import EngineOptions
from laconic.plan.machine import Machine
from laconic.plan.peers import PEERS
from laconic.plan.program import LaconicStep, LocalStepsProgram, Program, StepWork
from laconic.shard.policies import Cache


def _laconic(machine: Machine, config: Config, work: StepWork, shape: Shape) -> Program:
    cache = Cache(where=config.shard.cache, device_budget_bytes=config.shard.device_budget_bytes)
    if config.sync.is_local:
        return LocalStepsProgram(machine, work, shape, cache, config.sync)
    return LaconicStep(machine, work, shape, EngineOptions(sharding=work.sharding, cache=cache))


def _zero_plus_plus(machine: Machine, config: Config, work: StepWork, shape: Shape) -> Program:
    options = EngineOptions(sharding=work.sharding, cache=Cache(where="device"), syncs_always=True)
    return LaconicStep(machine, work, shape, options)


def _cyclic(machine: Machine, config: Config, work: StepWork, shape: Shape) -> Program:
    return CyclicProgram(machine, config, work)


def _own(
    name: str, label: str, source: str, *, inexact: str = "", sync: Mapping[str, Any] | None = None, **keys: Any
) -> Candidate:
    return Candidate(
        name=name, label=f"laconic {label}", make=_laconic, source=source, inexact=inexact, sync=sync,
        keys={"strategy": "laconic", "cache": "host", "wire": None, **keys},
    )  # fmt: skip


_NO_SHARDING = {field.name: field.default for field in dataclasses.fields(ShardConfig)}
BUDGET = "budget"
"""The strategy whose `device_budget_bytes` is what the host cache leaves of the device's memory."""
_ROUNDED = "crossings are rounded: losses within 0.13 % of exact crossings, either way (docs/thinner.md)"
_LOCAL = (
    "islands see only their own rows between syncs: within 0.2 % of every-step training after a warm-up, up to 20 % "
    "above it from scratch (docs/local-steps.md)"
)

CANDIDATES: dict[str, Candidate] = {
    each.name: each
    for each in (
        _own("none", "none", "ZeRO-3, arXiv 1910.02054", cache="none"),
        _own("host", "host", "FCDP, arXiv 2602.06499"),
        _own(BUDGET, "host + device", "FCDP, arXiv 2602.06499, section 4"),
        _own("device", "device", "hpZ of ZeRO++, arXiv 2306.10209, section 4.2", cache="device"),
        _own("8bit", "8bit", "SDP4Bit, arXiv 2410.15526, in eight bits", inexact=_ROUNDED, wire="8bit"),
        _own("4bit", "4bit", "SDP4Bit, arXiv 2410.15526", inexact=_ROUNDED, wire="4bit"),
        _own(
            "local-steps", "local steps", "DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512",
            inexact=_LOCAL, sync={},
        ),
        *(
            Candidate(
                name=name, label=f"laconic cyclic, {states}", make=_cyclic, source="CDP, arXiv 2403.08837",
                keys=_NO_SHARDING, schedule={"states": states}, inexact=CyclicProgram.inexact,
            )
            for name, states in (
                ("cyclic", "replicated"), ("cyclic-sharded", "sharded"), ("cyclic-shared", "shared"),
            )
        ),
        Candidate(
            name="zero++", label="ZeRO++ on our engine", make=_zero_plus_plus, is_peer=True,
            source="ZeRO++, arXiv 2306.10209", keys={"strategy": "zero++", "cache": "host", "wire": None},
            inexact="weights cross in 8 bits and gradients in 4, and nothing feeds the error back",
        ),
        *PEERS,
    )
}  # fmt: skip
"""All strategies, by name."""


def candidate_named(name: str) -> Candidate:
    """The strategy with this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CANDIDATES:
        raise ConfigError(f"strategy {name!r} is not known; there are {', '.join(CANDIDATES)}")
    return CANDIDATES[name]
