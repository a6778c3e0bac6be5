"""The strategies that the planner knows: laconic's own, and its peers'."""

from __future__ import annotations

from typing import Any

from laconic.config import Config
from laconic.plan.buckets import Shape
from laconic.plan.candidate import Candidate
from laconic.plan.engine import EngineOptions
from laconic.plan.machine import Machine
from laconic.plan.peers import PEERS
from laconic.plan.program import LaconicStep, LocalStepsProgram, Program, Work
from laconic.shard.cache import Cache


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
        *PEERS,
    )
}  # fmt: skip
"""All strategies, by name."""
