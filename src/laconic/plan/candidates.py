"""The registered strategies that the planner predicts, and the programs of those on laconic's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from laconic import registry
from laconic.config import ConfigError, ScheduleConfig, ShardConfig, SyncConfig
from laconic.plan.cyclic import CyclicProgram
from laconic.plan.local_steps import LocalStepsProgram
from laconic.plan.machine import Simulator
from laconic.plan.placing import placed
from laconic.plan.program import Program, Shape, StepWork
from laconic.plan.rehearsed import RehearsedStep
from laconic.registry import Strategy
from laconic.shard.policies import Wire

Make = Callable[[Simulator, StepWork, Shape], Program]
"""What `Strategy.predict` names: it makes a program from an idle machine, the work of a job under the strategy, and its
ranks."""
CANDIDATES: Mapping[str, Strategy] = {name: each for name, each in registry.strategies().items() if each.in_plan}
"""The strategies that the planner lists, by name."""
RUN_ALONE = tuple(each for each in registry.strategies().values() if not each.predict)
"""Engines of other makers: `laconic compare` runs them, and nothing predicts them."""


def candidate_named(name: str) -> Strategy:
    """The strategy with this name.

    Raises:
        ConfigError: there is none, or nothing predicts it.
    """
    name = registry.canonical(name)
    if any(name == each.name for each in RUN_ALONE):
        raise ConfigError(f"strategy {name!r} is run, not planned: `laconic compare` measures it beside the others")
    if name not in CANDIDATES:
        raise ConfigError(registry.unknown(name, CANDIDATES))
    return CANDIDATES[name]


def is_asked_for(strategy: Strategy, shard: ShardConfig, sync: SyncConfig, schedule: ScheduleConfig) -> bool:
    """Whether the job itself has chosen what makes this strategy inexact."""
    if strategy.has_islands or strategy.schedule is not None:
        has_sync = strategy.has_islands and sync.is_local
        return has_sync or (strategy.schedule is not None and schedule.is_cyclic)
    wire = strategy.shard.get("wire")
    return wire is not None and shard.policy.wire == Wire.of(wire)


def on_engine(machine: Simulator, work: StepWork, shape: Shape) -> Program:
    """The engine, with islands or without: a `Make`."""
    make = LocalStepsProgram if work.job.sync.is_local else RehearsedStep
    if work.job.shard.policy.cache.where != "auto":
        return make(machine, work, shape)
    found = placed(machine, work, shape, make)
    program = make(machine, replace(work, placements=found.placements), shape)
    program.notes = (str(found.choice),)
    return program


def cyclic(machine: Simulator, work: StepWork, shape: Shape) -> Program:
    """The cyclic schedule: a `Make`."""
    return CyclicProgram(machine, work)
