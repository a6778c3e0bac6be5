"""A job under a registered strategy. Nothing here imports torch."""

import dataclasses
from typing import Any

from laconic.config import Config, PipelineConfig, ScheduleConfig, ShardConfig, SyncConfig
from laconic.config.sections import CHECKED
from laconic.errors import JobError
from laconic.policy import keys_of
from laconic.registry import Strategy, named, strategies


def job_under(strategy: Strategy, config: Config) -> Config:
    """`config` with the keys of `strategy` in its sections, and without keys of [shard] that are for other strategies.

    The budgets of the cache stay, and so do the keys of [sync], [schedule] and [pipeline] that the strategy does not
    set. A pipeline of a job without one has as many stages as nodes. A job that has one says where stages rest, too.

    Raises:
        ConfigError: the strategy cannot run the job.
    """
    if strategy.schedule is not None:
        schedule = config.schedule if config.schedule.is_cyclic else ScheduleConfig(kind="cyclic")
        return dataclasses.replace(
            config, shard=ShardConfig(), sync=SyncConfig(), pipeline=PipelineConfig(),
            schedule=dataclasses.replace(schedule, **strategy.schedule),
        )  # fmt: skip
    keys: dict[str, Any] = {"cache": "host", "cache_until": "change", "wire": None, "cluster": None, **strategy.shard}
    if strategy.on_engine and strategy.pipeline is not None and config.pipeline.is_on:
        keys["cache"] = config.shard.policy.cache.where
    if not strategy.on_engine or keys["cache"] != "host":
        keys["device_budget_bytes"] = 0
    if not strategy.on_engine or keys["cache"] != "auto":
        keys |= {"device_bytes": None, "host_bytes": None}
    if not strategy.on_engine or keys["cache"] == "auto":
        keys["cache_gradients"] = "node"
    if not strategy.on_engine:
        keys["shares"] = None
    if not strategy.takes_checks:
        keys |= {key: keys_of(ShardConfig)[key].default for key in CHECKED}
    sync = SyncConfig()
    if strategy.sync is not None:
        sync = config.sync if config.sync.is_local else SyncConfig(mode="local")
        sync = sync.with_keys(**strategy.sync)
    pipeline = PipelineConfig()
    if strategy.pipeline is not None:
        pipeline = config.pipeline if config.pipeline.is_on else PipelineConfig(stages="nodes")
        pipeline = dataclasses.replace(pipeline, **strategy.pipeline)
    train = config.train if strategy.saves else dataclasses.replace(config.train, save_every=-1, resume="never")
    shard = config.shard.with_keys(**keys)
    return dataclasses.replace(
        config, shard=shard, sync=sync, schedule=ScheduleConfig(), pipeline=pipeline, train=train
    )


def strategy_of(
    shard: ShardConfig, sync: SyncConfig, schedule: ScheduleConfig, pipeline: PipelineConfig | None = None
) -> Strategy:
    """The registered strategy under which a job trains: that of its stages, islands or schedule, or shard.strategy.

    Raises:
        JobError: shard.strategy has no stages, and the job has.
    """
    found = named(shard.strategy)
    if pipeline is not None and pipeline.is_on:
        staged = {each.shard["strategy"]: each for each in strategies().values() if each.pipeline is not None}
        if found.name not in staged:
            names = " or ".join(map(repr, sorted(staged)))
            raise JobError(
                f"pipeline.stages = {pipeline.stages!r} needs shard.strategy = {names}, got {shard.strategy!r}, "
                "whose ranks hold all layers; change one of the two"
            )
        return staged[found.name]
    if schedule.is_cyclic:
        states = {"states": schedule.states}
        return next(each for each in strategies().values() if each.schedule == states)
    return named("local-steps") if sync.is_local and found.is_own else found
