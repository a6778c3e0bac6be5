"""Refuses jobs whose sections do not fit together, or do not fit the launch, before anything is created."""

from laconic import registry
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, ShardConfig
from laconic.cyclic.schedule import RULES, Rule
from laconic.policy import keys_of, to_keys
from laconic.strategies.cyclic import num_workers
from laconic.strategies.islands import num_islands


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
    strategy = registry.named(config.shard.strategy)
    launch = {"ranks_per_node": ranks.num_local, "device": device_type}
    for section, values in {**{name: to_keys(each) for name, each in vars(config).items()}, "launch": launch}.items():
        if problem := strategy.problem(section, values):
            raise JobError(problem)
    _refuse_if(
        not strategy.saves and (config.train.save_every != -1 or config.train.resume != "never"),
        f"shard.strategy = {strategy.name!r} is for comparisons, and its runs write and read no checkpoints; set "
        "train.save_every = -1 and train.resume = 'never'",
    )
    if config.sync.is_local and strategy.is_own:
        _check_islands(config)
    if config.schedule.is_cyclic:
        _check_cyclic(config)
        check_workers(config, ranks)
    _refuse_if(
        config.shard.audit_every > 0 and ranks.world_size == num_islands(config.sync, ranks),
        f"shard.audit_every = {config.shard.audit_every} compares ranks that share a model, but each island has one "
        "rank; leave it out",
    )


def check_workers(config: Config, ranks: RankInfo) -> None:
    """Refuse settings of a cyclic schedule that its number of workers or ranks does not allow.

    Raises:
        JobError: the ranks do not fit; the gradient norm is clipped, but is not known in time under the rule; shared
            stages do not allow the rule; or memory is measured on several ranks.
    """
    workers = num_workers(config.schedule, ranks)
    rule, limit = config.schedule.rule, config.optimizer.max_grad_norm
    allowed = [name for name in reversed(RULES) if Rule.named(name, workers).allows_global_norm]
    _refuse_if(
        limit > 0 and rule not in allowed,
        f"optimizer.max_grad_norm = {limit} (default: 1.0) clips by the norm of all stages' gradients, and under "
        f"schedule.rule = {rule!r} some stages are updated before the norm is known; set optimizer.max_grad_norm = 0, "
        f"or schedule.rule to {' or '.join(map(repr, allowed))}",
    )
    _refuse_if(
        config.schedule.states == "shared" and rule == "dp",
        "schedule.states = 'shared' needs workers at different times, and under schedule.rule = 'dp' all are at the "
        "same stage at once; choose another rule",
    )
    _refuse_if(
        config.log.memory_step > 0 and ranks.world_size > 1,
        f"log.memory_step = {config.log.memory_step} and schedule.kind = 'cyclic' on {ranks.world_size} ranks: "
        "messages are under way between steps, and torch's profiler then crashes; leave the key out, or use one rank",
    )


def _check_islands(config: Config) -> None:
    sync = config.sync
    _refuse_if(
        config.shard.policy.precision.param_dtype == "float16",
        "shard.param_dtype = 'float16' and sync.mode = 'local': islands would skip different steps when gradients "
        "overflow; use shard.param_dtype = 'bfloat16'",
    )
    _refuse_if(
        sync.slices > 1 and config.lora.enabled,
        f"sync.slices = {sync.slices} and lora.enabled = true: only adapters train, and adapters are not sliced; leave "
        "sync.slices out",
    )
    _refuse_if(
        sync.slices > 1 and config.train.compile,
        f"sync.slices = {sync.slices} and train.compile = true: products of slices are not compiled; leave one of the "
        "two out",
    )
    _refuse_if(
        sync.recovery is not None and config.train.resume == "never",
        f"sync.recovery = {sync.recovery!r} is for a run that goes on when torchrun starts it again; set "
        "train.resume = 'auto' (a run without anything to resume starts from step 0)",
    )


def _check_cyclic(config: Config) -> None:
    _refuse_if(
        config.sync.is_local,
        "sync.mode = 'local' and schedule.kind = 'cyclic': islands train on their own, but workers of the cyclic "
        "schedule exchange every gradient; change one of the two",
    )
    _refuse_if(
        config.train.compile,
        "train.compile = true and schedule.kind = 'cyclic': torch.compile is for layers that stay whole modules, and "
        "this schedule cuts the model into stages; leave one of the two out",
    )
    _refuse_if(
        config.lora.quantize is not None,
        f"lora.quantize = {config.lora.quantize!r} and schedule.kind = 'cyclic', which sends whole stages in the dtype "
        "of their parameters; leave one of the two out",
    )
    for name, value in to_keys(config.shard).items():
        _refuse_if(
            value != keys_of(ShardConfig)[name].default,
            f"shard.{name} = {value!r} and schedule.kind = 'cyclic', which takes the place of sharding; leave "
            "shard.* out, and set schedule.states = 'sharded' to keep parameters with one worker each",
        )
    _refuse_if(
        config.train.accumulation > 1,
        f"train.accumulation = {config.train.accumulation} and schedule.kind = 'cyclic': every worker has one "
        "micro-batch per step; raise train.micro_batch_size, or schedule.workers",
    )
    _refuse_if(
        config.data.packing is True and config.schedule.states == "shared",
        "data.packing = true and schedule.states = 'shared': the masks of packed rows do not all have one shape, as "
        "activations that cross between devices must; set data.packing = false, or schedule.states = 'sharded'",
    )
    _refuse_if(
        config.optimizer.name in ("muon", "shampoo"),
        f"optimizer.name = {config.optimizer.name!r} and schedule.kind = 'cyclic': every stage has an optimizer of its "
        "own, which cannot tell hidden layers from others; use 'adamw' or 'adamw8bit'",
    )


def _refuse_if(condition: bool, message: str) -> None:
    if condition:
        raise JobError(message)
