"""The registered strategies that the planner predicts, and where units rest under those on laconic's engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from laconic import registry
from laconic.comm.speed import Speed
from laconic.config import ConfigError, PipelineConfig, ShardConfig, SyncConfig
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import process_bytes
from laconic.plan.rehearsed import LocalStepsProgram, RehearsedStep, StepWork
from laconic.registry import Strategy
from laconic.rehearse.rings import Places
from laconic.shard.placement import Chosen, Speeds, choose_placements
from laconic.shard.policies import Placement, Wire
from laconic.shard.room import MARGIN

CANDIDATES: Mapping[str, Strategy] = {name: each for name, each in registry.strategies().items() if each.in_plan}
"""The strategies that the planner lists, by name."""
RUN_ALONE = tuple(each for each in registry.strategies().values() if not each.predict)
"""Engines of other makers, the cyclic schedule and FSDP2's pipeline: they run, and nothing predicts them."""


def candidate_named(name: str) -> Strategy:
    """The strategy with this name.

    Raises:
        ConfigError: there is none, or nothing predicts it.
    """
    name = registry.canonical(name)
    if any(name == each.name for each in RUN_ALONE):
        raise ConfigError(f"strategy {name!r} is run, not planned: a short run of laconic train or compare measures it")
    if name not in CANDIDATES:
        raise ConfigError(registry.unknown(name, CANDIDATES))
    return CANDIDATES[name]


def is_asked_for(strategy: Strategy, shard: ShardConfig, sync: SyncConfig, pipeline: PipelineConfig) -> bool:
    """Whether the job itself has chosen what makes this strategy inexact."""
    if strategy.pipeline is not None:
        return pipeline.is_on
    if strategy.has_islands:
        return sync.is_local
    wire = strategy.shard.get("wire")
    return wire is not None and shard.policy.wire == Wire.of(wire)


def on_engine(cluster: ClusterSpec, work: StepWork, *, keeps_spans: bool = False) -> RehearsedStep:
    """The engine, with islands or without."""
    make = LocalStepsProgram if work.job.sync.is_local else RehearsedStep
    if work.job.shard.policy.cache.where != "auto":
        return make(cluster, work, keeps_spans=keeps_spans)
    placements, choice = placed(cluster, work, make)
    program = make(cluster, replace(work, placements=placements), keeps_spans=keeps_spans)
    program.notes = (str(choice),)
    return program


def placed(cluster: ClusterSpec, work: StepWork, make: type[RehearsedStep]) -> tuple[Mapping[str, Placement], Chosen]:
    """Choose where units rest as the engine will after the first step of a job with `cache = "auto"`.

    The first step of such a run is one in which nothing rests, or node shards on the host if their copies are needed.
    It is rehearsed for what it needs of the device, and for the use of each unit. What is left is the engine's to
    choose within: [Note: Placement] in shard/placement.py. Returns the placement of each unit by its name, and the
    choice.

    Args:
        cluster: its machines.
        work: of a job with `cache = "auto"`.
        make: the program of the same job with another cache.

    Raises:
        ValueError: copies of weights for differences on the wire have no room.
    """
    policy, device_type = work.job.shard.policy, work.trace.device_type
    first = policy.cache.placement(keeps_copies=policy.wire.sends_differences)
    keys = {"cache": first.weights, "device_bytes": None, "host_bytes": None}
    work = replace(work, job=replace(work.job, shard=work.job.shard.with_keys(**keys)))
    needed_bytes = make(cluster, work).read().peak_bytes + process_bytes(device_type)
    device_bytes, host_bytes = policy.cache.device_bytes, policy.cache.host_bytes
    if device_bytes is None:
        device_bytes = max(0, math.floor(cluster.device_memory_bytes * (1 - 1 / MARGIN) - needed_bytes))
    if host_bytes is None:
        free_bytes = cluster.host_memory_bytes * (1 - 1 / MARGIN) / cluster.ranks_per_node
        host_bytes = 0 if device_type == "cpu" else math.floor(free_bytes)
    first_step = work.rehearsals.of(work.job, work.trace, work.places)
    speeds = speeds_of(cluster, work.places, device_type=device_type)
    choice = choose_placements(
        list(first_step.uses.values()), speeds, device_bytes=device_bytes, host_bytes=host_bytes,
        passing=first_step.passing,
    )  # fmt: skip
    return dict(zip(first_step.uses, choice.placements, strict=True)), choice


def speeds_of(cluster: ClusterSpec, places: Places, *, device_type: str) -> Speeds:
    """The speeds of transfers that all ranks of a cluster have at once. The ranks of a node share its wire."""
    node, local = Speed(), Speed()
    if places.nodes > 1:
        rate = cluster.bytes_per_s("node") / cluster.ranks_per_node
        node = Speed(latency_s=cluster.latency_s("node"), bytes_per_s=rate)
    if places.local > 1:
        local = Speed(latency_s=cluster.latency_s("local"), bytes_per_s=cluster.bytes_per_s("local"))
    copy = None if device_type == "cpu" else Speed(bytes_per_s=cluster.host_bytes_per_s(to_device=True))
    return Speeds(node=node, local=local, copy=copy)
