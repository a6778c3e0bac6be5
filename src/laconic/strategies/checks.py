"""Refuses jobs whose sections do not fit together, or do not fit the launch, before anything is created."""

from laconic.comm.launch import RankInfo
from laconic.config import (
    Config,
    JobError,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    ScheduleConfig,
    ShardConfig,
    SyncConfig,
    TrainConfig,
)
from laconic.cyclic.coding import check_wire
from laconic.cyclic.schedule import RULES, Rule
from laconic.policy import keys_of, to_keys
from laconic.strategies.cyclic import num_workers
from laconic.strategies.islands import num_islands
from laconic.strategies.pipeline import pipeline_policy
from laconic.strategies.under import strategy_of


def check_job(config: Config, ranks: RankInfo, device_type: str | None = None) -> None:
    """Refuse a job that cannot run. Without `device_type`, what depends on the type of the devices is not checked.

    Raises:
        JobError: there is no model; or other sections, the ranks or the devices do not allow the strategy, the
            optimizer, islands or the schedule.
    """
    _refuse_if(
        config.model.config is None and config.model.path is None,
        "no model: set model.config (a table with `model_type`, or the path of a config.json) or model.path (a folder)",
    )
    strategy = strategy_of(config.shard, config.sync, config.schedule, config.pipeline)
    launch = {"ranks_per_node": ranks.num_local, "device": device_type}
    for section, values in {**{name: to_keys(each) for name, each in vars(config).items()}, "launch": launch}.items():
        if problem := strategy.problem(section, values):
            raise JobError(problem)
    _refuse_if(
        not strategy.saves and (config.train.save_every != -1 or config.train.resume != "never"),
        f"shard.strategy = {strategy.name!r} is for comparisons, and its runs write and read no checkpoints; set "
        "train.save_every = -1 and train.resume = 'never'",
    )
    if config.pipeline.is_on:
        pipeline_policy(config.pipeline, config.train, ranks)
    elif config.schedule.is_cyclic:
        _check_sharding(config.shard)
        check_workers(config.schedule, config.optimizer, config.log, ranks)
    elif config.sync.is_local and strategy.is_own:
        _check_islands(config.sync, config.lora, config.train)
    policy, dtype = config.shard.policy, config.model.dtype
    _refuse_if(
        strategy.is_own and policy.wire.weights == "lossless" and (policy.precision.param_dtype or dtype) == "float32",
        f"shard.wire sends patterns of 16 bits or fewer without loss, but model.dtype = {dtype!r} gathers 32, of which "
        "most change in every step; set shard.param_dtype = 'bfloat16', or another shard.wire",
    )
    islands = num_islands(config.sync, ranks)
    _check_rows(config.train, config.shard, ranks.world_size, islands)
    with config.shard.in_own_words():
        config.shard.policy.audits.check_ranks(ranks.world_size // islands)


def check_workers(schedule: ScheduleConfig, optimizer: OptimizerConfig, log: LogConfig, ranks: RankInfo) -> None:
    """Refuse settings of a cyclic schedule that its number of workers or ranks does not allow.

    Raises:
        JobError: the ranks do not fit; the gradient norm is clipped, but is not known in time under the rule; shared
            stages do not allow the rule; the cache or the wire does not fit the states; or memory is measured on
            several ranks.
    """
    workers = num_workers(schedule, ranks)
    rule, limit = schedule.rule, optimizer.max_grad_norm
    allowed = [name for name in reversed(RULES) if Rule.named(name, workers).allows_global_norm]
    _refuse_if(
        limit > 0 and rule not in allowed,
        f"optimizer.max_grad_norm = {limit} (default: 1.0) clips by the norm of all stages' gradients, and under "
        f"schedule.rule = {rule!r} some stages are updated before the norm is known; set optimizer.max_grad_norm = 0, "
        f"or schedule.rule to {' or '.join(map(repr, allowed))}",
    )
    _refuse_if(
        schedule.states == "shared" and rule == "dp",
        "schedule.states = 'shared' needs workers at different times, and under schedule.rule = 'dp' all are at the "
        "same stage at once; choose another rule",
    )
    _refuse_if(
        schedule.cache == "host" and (schedule.states != "sharded" or ranks.world_size == 1),
        f"schedule.cache = 'host' has nothing to keep with schedule.states = {schedule.states!r} on {ranks.world_size} "
        "ranks, where no weights come again for a backward; set schedule.states = 'sharded' on several ranks, or leave "
        "the key out",
    )
    try:
        check_wire(schedule.wire, schedule.states)
    except ValueError as error:
        raise JobError(f"schedule.wire: {error}") from None
    _refuse_if(
        log.memory_step > 0 and ranks.world_size > 1,
        f"log.memory_step = {log.memory_step} and schedule.kind = 'cyclic' on {ranks.world_size} ranks: "
        "messages are under way between steps, and torch's profiler then crashes; leave the key out, or use one rank",
    )


def _check_islands(sync: SyncConfig, lora: LoraConfig, train: TrainConfig) -> None:
    _refuse_if(
        sync.slices > 1 and lora.enabled,
        f"sync.slices = {sync.slices} and lora.enabled = true: only adapters train, and adapters are not sliced; leave "
        "sync.slices out",
    )
    _refuse_if(
        sync.slices > 1 and train.compile,
        f"sync.slices = {sync.slices} and train.compile = true: products of slices are not compiled; leave one of the "
        "two out",
    )
    _refuse_if(
        sync.membership.recovery is not None and train.resume == "never",
        f"sync.recovery = {sync.membership.recovery!r} is for a run that goes on when torchrun starts it again; set "
        "train.resume = 'auto' (a run without anything to resume starts from step 0)",
    )


def _check_rows(train: TrainConfig, shard: ShardConfig, num_ranks: int, islands: int) -> None:
    """Refuse rows of ranks that do not add up, and speeds that are measured after memory is: [Note: Unequal rows]."""
    cache = shard.policy.cache
    _refuse_if(
        train.rows == "by-speed" and cache.where == "auto" and None in (cache.device_bytes, cache.host_bytes),
        "train.rows = 'by-speed' and shard.cache = 'auto': the cache takes what the first step leaves free, and later "
        "the micro-batches of faster ranks grow; set shard.device_bytes and shard.host_bytes, or give the rows of each "
        "rank as a list",
    )
    if not isinstance(train.rows, tuple):
        return
    given = f"train.rows = {list(train.rows)}"
    _refuse_if(
        len(train.rows) != num_ranks, f"{given} has rows for {len(train.rows)} ranks, and there are {num_ranks}"
        "; give the rows of each rank, or set train.rows = 'by-speed'",
    )  # fmt: skip
    size = num_ranks // islands
    wanted = size * train.micro_batch_size * train.accumulation
    for island in range(islands):
        found = sum(train.rows[island * size : (island + 1) * size])
        where = "" if islands == 1 else f" for island {island}, ranks {island * size} to {(island + 1) * size - 1}"
        _refuse_if(
            found != wanted,
            f"{given} adds up to {found}{where}; it must be {wanted}: {size} ranks x train.micro_batch_size = "
            f"{train.micro_batch_size} x train.accumulation = {train.accumulation}",
        )


def _check_sharding(shard: ShardConfig) -> None:
    for name, value in to_keys(shard).items():
        _refuse_if(
            value != keys_of(ShardConfig)[name].default,
            f"shard.{name} = {value!r} and schedule.kind = 'cyclic', which takes the place of sharding; leave "
            "shard.* out, and set schedule.states = 'sharded' to keep parameters with one worker each",
        )


def _refuse_if(condition: bool, message: str) -> None:
    if condition:
        raise JobError(message)
