"""A job under a registered strategy. Nothing here imports torch."""

import dataclasses
from typing import Any

from laconic.config import Config, ScheduleConfig, ShardConfig, SyncConfig
from laconic.config.sections import CHECKED
from laconic.policy import keys_of
from laconic.registry import Strategy, named, strategies


def job_under(strategy: Strategy, config: Config) -> Config:
    """`config` with the keys of `strategy` in its sections, and without keys of [shard] that are for other strategies.

    The budgets of the cache stay, and so do the keys of [sync] and [schedule] that the strategy does not set.

    Raises:
        ConfigError: the strategy cannot run the job.
    """
    if strategy.schedule is not None:
        schedule = config.schedule if config.schedule.is_cyclic else ScheduleConfig(kind="cyclic")
        return dataclasses.replace(
            config, shard=ShardConfig(), sync=SyncConfig(), schedule=dataclasses.replace(schedule, **strategy.schedule)
        )
    keys: dict[str, Any] = {"cache": "host", "cache_until": "change", "wire": None, "cluster": None, **strategy.shard}
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
    train = config.train if strategy.saves else dataclasses.replace(config.train, save_every=-1, resume="never")
    shard = config.shard.with_keys(**keys)
    return dataclasses.replace(config, shard=shard, sync=sync, schedule=ScheduleConfig(), train=train)


def strategy_of(shard: ShardConfig, sync: SyncConfig, schedule: ScheduleConfig) -> Strategy:
    """The registered strategy under which a job trains: its islands' or its schedule's, or that of shard.strategy."""
    found = named(shard.strategy)
    if schedule.is_cyclic:
        states = {"states": schedule.states}
        return next(each for each in strategies().values() if each.schedule == states)
    return named("local-steps") if sync.is_local and found.is_own else found
