"""Jobs with schedule.kind = 'cyclic': what is refused, how steps are taken, and what a checkpoint holds of them.

[Note: Checkpoints of the cyclic schedule]
The model is written under its ordinary names, with the optimizer's state, so that export and load_dcp need know nothing
of stages. In mid-run it is the newest model that all stages can be given, without the gradient of the last batch, which
is still on its way. That gradient is written as if the optimizer had one more state, `pending_gradient`, and everything
small (settings that belong to it, the cut) with each rank's `extra`. A resumed run cuts the model as before, reads what
it holds, and goes on to the same bits. After the last step the schedule is drained first, and nothing is pending.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import laconic.checkpoint
from laconic.checkpoint import commit, sidecar, state, storage
from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config.job import Config, JobError, ShardConfig
from laconic.cyclic import CyclicDataParallel, Rule, cut
from laconic.cyclic.schedule.rule import RULES
from laconic.hf.lora import base_model
from laconic.hf.models import materialize
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_stage_optimizer
from laconic.strategies.spread import Memory
from laconic.strategies.staggering import Staggering
from laconic.strategies.stepper import NotFinite, Save, Taken

_PENDING = "pending_gradient"


def require_schedule(config: Config) -> None:
    """Refuse a cyclic schedule that the rest of the job cannot have."""
    if not config.schedule.is_cyclic:
        return
    if config.sync.is_local:
        raise JobError(
            "sync.mode = 'local' and schedule.kind = 'cyclic': islands train on their own, and workers of the cyclic "
            "schedule tell each other every gradient; change one of the two"
        )
    for item in dataclasses.fields(ShardConfig):
        if (value := getattr(config.shard, item.name)) != item.default:
            raise JobError(
                f"shard.{item.name} = {value!r} and schedule.kind = 'cyclic', which takes the place of sharding; leave "
                "shard.* out, and set schedule.states = 'sharded' to keep parameters with one worker each"
            )
    if config.train.accumulation > 1:
        raise JobError(
            f"train.accumulation = {config.train.accumulation} and schedule.kind = 'cyclic': every worker has one "
            "micro-batch per step; raise train.micro_batch_size, or schedule.workers"
        )
    if config.optimizer.name in ("muon", "shampoo"):
        raise JobError(
            f"optimizer.name = {config.optimizer.name!r} and schedule.kind = 'cyclic', whose stages have an optimizer "
            "each that does not know hidden layers from others; use 'adamw' or 'adamw8bit'"
        )


def num_workers(config: Config, ranks: RankInfo) -> int:
    """Workers of this launch, and stages; 0 without a cyclic schedule. Raises: JobError."""
    schedule, launched = config.schedule, ranks.world_size
    if not schedule.is_cyclic:
        return 0
    if launched == 1:
        if schedule.workers is None:
            raise JobError(
                "schedule.kind = 'cyclic' and one rank: set schedule.workers to the micro-batches to interleave on its "
                "device, or start more ranks"
            )
        workers = schedule.workers
    elif schedule.states == "shared":
        workers = (isqrt(8 * launched + 1) - 1) // 2
        if (schedule.workers or workers) != workers or workers * (workers + 1) // 2 != launched:
            wanted = schedule.workers or workers + 1
            raise JobError(
                f"schedule.states = 'shared' needs N (N + 1) / 2 ranks for N workers, and schedule.workers = "
                f"{schedule.workers} with {launched} ranks does not fit; start {wanted * (wanted + 1) // 2} ranks"
                + (f" for {wanted} workers" if schedule.workers is None else ", or leave schedule.workers out")
            )
    else:
        workers = launched
        if schedule.workers not in (None, workers):
            raise JobError(
                f"schedule.workers = {schedule.workers}, but there are {launched} ranks, and each is a worker; start "
                f"{schedule.workers} ranks (or one, which interleaves them), or leave schedule.workers out"
            )
    _require_rule(config, workers)
    if config.log.memory_step and launched > 1:
        raise JobError(
            f"log.memory_step = {config.log.memory_step} and schedule.kind = 'cyclic' on {launched} ranks: messages "
            "are under way between steps, which torch's profiler does not survive; leave it out, or measure on one rank"
        )
    return workers


def _require_rule(config: Config, workers: int) -> None:
    rule, limit = config.schedule.rule, config.optimizer.max_grad_norm
    if limit and not Rule.named(rule, workers).allows_global_norm:
        able = " or ".join(repr(name) for name in reversed(RULES) if Rule.named(name, workers).allows_global_norm)
        raise JobError(
            f"optimizer.max_grad_norm = {limit} (default: 1.0) clips by the norm of all stages' gradients, and under "
            f"schedule.rule = {rule!r} some stages are updated before it is known; set optimizer.max_grad_norm = 0, or "
            f"schedule.rule to {able}"
        )
    if config.schedule.states == "shared" and rule == "dp":
        raise JobError(
            "schedule.states = 'shared' needs workers at different times, and under schedule.rule = 'dp' all are at "
            "the same stage at once; choose another rule"
        )


class CyclicStepper:
    """A `Stepper` (strategies/stepper.py) of workers that run one after the other."""

    steps_per_sync: int | None = None
    recovered_steps = 0

    def __init__(
        self, model: nn.Module, config: Config, ranks: RankInfo, device: torch.device, saved: dict[str, Any] | None
    ) -> None:
        """Collective. `saved` is the `extra` of the checkpoint that will be loaded, if there is one, the same on all
        ranks."""
        schedule = config.schedule
        materialize(model, config.model, device)
        self.module: Any = model
        self.num_workers = num_workers(config, ranks)
        self.stages = self._cut(config, _saved_cut(saved, self.num_workers))
        self.blocks_by_stage = [stage.num_blocks for stage in self.stages]
        """How the model was cut."""
        mesh = init_device_mesh(device.type, (ranks.world_size,)) if ranks.world_size > 1 else None
        self.run = CyclicDataParallel(
            self.stages,
            _loss_fn(model),
            make_stage_optimizer(config),
            mesh,
            rule=schedule.rule,
            states=schedule.states,
            stagger=schedule.stagger,
            max_grad_norm=config.optimizer.max_grad_norm or None,
        )
        self.optimizer: torch.optim.Optimizer = self.run.optimizer
        has_own = mesh is not None and schedule.states != "shared"
        self.workers = range(ranks.rank, ranks.rank + 1) if has_own else range(self.num_workers)

    def _cut(self, config: Config, blocks_by_stage: list[int] | None) -> list[Any]:
        device = next(self.module.parameters()).device
        shape = (config.train.micro_batch_size, config.data.sequence_length)
        example = torch.arange(shape[0] * shape[1], device=device).reshape(shape)
        example %= base_model(self.module).get_input_embeddings().num_embeddings
        by: Any = config.schedule.cut_by
        if blocks_by_stage is not None:  # costs of which these stages have equal shares
            by = [1 / count for count in blocks_by_stage for _ in range(count)]
        return list(cut(self.module, self.num_workers, example=example, by=by))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See Stepper."""
        self.module.train()

    def step(self, rows: Tensor, *, is_last: bool) -> Taken:
        """See Stepper."""
        micro_batches = [(micro_batch, micro_batch) for micro_batch in rows]
        loss = self.run.step(micro_batches if len(self.workers) > 1 else micro_batches[0])
        value = None if loss is None else float(loss)
        if value is not None and not math.isfinite(value):
            raise NotFinite(
                loss=value,
                grad_norm=None,
                is_known_to_all=False,
                weights="lost: gradients of steps {step} and after were on their way",
            )
        if is_last:
            self.run.drain()
        return Taken(loss=value, grad_norm=None, staggering=Staggering.of(self.run.report))

    def loss(self, rows: Tensor) -> Tensor:
        """See Stepper."""
        return self.module(input_ids=rows, labels=rows, use_cache=False).loss

    def consistent(self) -> AbstractContextManager[Any]:
        """See Stepper: all stages at one version."""
        return self.run.consistent_parameters()

    def close(self) -> None:
        """See Stepper."""
        self.run.close()

    # -- figures -------------------------------------------------------------------------------------------------------

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See Stepper."""
        return self.run.traffic.snapshot()

    def memory(self) -> Memory | None:
        """See Stepper: nobody accounts for it."""
        return None

    def resting_bytes(self) -> int:
        """See Stepper."""
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self.module.parameters()}
        return sum(storages.values()) + sum(state_nbytes(optimizer) for optimizer in self.run.optimizer.by_stage)

    # -- checkpoints: [Note: Checkpoints of the cyclic schedule] -------------------------------------------------------

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See Stepper."""
        states = self.run.state_dict()
        small = _from_all_ranks({key: value for key, value in states.items() if not isinstance(value, Tensor)})
        tensors: dict[Tensor, dict[str, Tensor]] = {}
        for stage, name, parameter in self._trained():
            prefix, pending = f"stages.{stage}.optimizer.{name}.", f"stages.{stage}.gradient.{name}"
            own = {k.removeprefix(prefix): v for k, v in states.items() if k.startswith(prefix) and k not in small}
            if small["is_pending"] and pending in states:
                own[_PENDING] = states[pending]
            if own:
                tensors[parameter] = own
        told = {**extra, "schedule": {"cut": self.blocks_by_stage, "values": small}}
        with self.run.consistent_parameters():
            save(model=self.module, optimizer=_StageStates(self.optimizer.param_groups, tensors), extra=told)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See Stepper."""
        with self.run.consistent_parameters():
            extra = laconic.checkpoint.load_checkpoint(folder, model=self.module, optimizer=None)
            if extra is None:
                return None
            _saved_cut(extra, self.num_workers)
            at = folder / f"step-{extra['step']}"
            loaded = self._states(extra["schedule"]["values"], at if at.exists() else folder)
        self.run.load_state_dict(loaded)
        return extra

    def _states(self, small: dict[str, Any], folder: Path) -> dict[str, Any]:
        """What the run needs of a checkpoint whose model is in `self.module` now."""
        states: dict[str, Any] = {**self.run.blank_state_dict(), **small}
        for key in ("settings", "pending_settings"):
            states[key] = _like(self.run.optimizer.settings(), small[key])
        for stage, module in enumerate(self.stages):
            for name, parameter in module.named_parameters():
                states[f"stages.{stage}.parameters.{name}"] = parameter.detach().clone()
            for name, buffer in module.named_buffers():
                states[f"devices.{dist.get_rank()}.stages.{stage}.buffers.{name}"] = buffer.clone()
        names = {id(parameter): name for name, parameter in state.named_parameters(self.module).items()}
        wanted: dict[str, Tensor] = {}
        for stage, name, parameter in self._trained():
            prefix, pending = f"stages.{stage}.optimizer.{name}.", f"stages.{stage}.gradient.{name}"
            if pending not in states:  # the stage is updated elsewhere
                continue
            own = {key.removeprefix(prefix): v for key, v in states.items() if key.startswith(prefix)}
            own |= {_PENDING: states[pending]} if small["is_pending"] else {}
            saved = f"optim.state.{names[id(parameter)]}"
            wanted |= {f"{saved}.{key}": value for key, value in own.items() if isinstance(value, Tensor)}
        storage.load(wanted, folder, offline=True)
        return states

    def _trained(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for stage, module in enumerate(self.stages):
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield stage, name, parameter


class _StageStates(torch.optim.Optimizer):
    """What a checkpoint sees in place of the optimizers of all stages: a rank's part of their state."""

    def __init__(self, groups: list[dict[str, Any]], tensors: dict[Tensor, dict[str, Tensor]]) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.state.update(tensors)


def newest_extra(checkpoints: Path) -> dict[str, Any] | None:
    """What rank 0 had put into the newest checkpoint that looks complete; None if there is none."""
    for candidate in commit.candidates(checkpoints):
        if candidate.manifest is not None:
            return {"step": candidate.manifest.step, **sidecar.read(candidate.folder / sidecar.name(0))["extra"]}
    return None


def _saved_cut(saved: dict[str, Any] | None, workers: int) -> list[int] | None:
    """Blocks by stage. Raises: JobError if the run was another one."""
    if saved is None:
        return None
    if "schedule" not in saved:
        raise JobError(
            f"the checkpoint of step {saved['step']} was written with schedule.kind = 'simultaneous', and its "
            "optimizer has no stages; go on with that, or export the model and begin anew from it (model.path)"
        )
    blocks = list(saved["schedule"]["cut"])
    if len(blocks) != workers:
        raise JobError(
            f"the checkpoint of step {saved['step']} has {len(blocks)} stages, and this launch {workers} workers; go "
            f"on with {len(blocks)} workers, or export the model and begin anew from it (model.path)"
        )
    return blocks


def _loss_fn(model: nn.Module) -> Any:
    """Of the model itself, which shifts the labels."""
    base: Any = base_model(model)
    if getattr(base.config, "output_router_logits", False):
        raise JobError(
            "model.config.output_router_logits = true adds a loss of all layers' routers, which no stage can see; set "
            "it to false"
        )
    loss_function, vocab_size = base.loss_function, base.config.vocab_size
    return lambda logits, rows: loss_function(logits=logits, labels=rows, vocab_size=vocab_size)


def _from_all_ranks(own: dict[str, Any]) -> dict[str, Any]:
    """Small values of all ranks together. Collective."""
    return {key: value for part in RankGroup().gather(own) for key, value in part.items()}


def _like(ours: Any, saved: Any) -> Any:
    """Settings by stage and group as they were; JSON has no tuples, and betas are one."""

    def restored(group: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in kept.items()}

    return [
        [restored(group, kept) for group, kept in zip(groups, kept_groups, strict=True)]
        for groups, kept_groups in zip(ours, saved or ours, strict=True)
    ]
