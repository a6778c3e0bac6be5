"""The stepper of jobs with schedule.kind = 'cyclic', whose workers run one after the other.

[Note: Checkpoints of the cyclic schedule]
A checkpoint holds the model under its ordinary names, so that export and `load_dcp` need not know about stages. In the
middle of a run, it is the newest version that all stages can have, without the gradient of the last batch. That
gradient is stored as one more state of the optimizer, `pending_gradient`, and so are the copies that workers have of
weights that cross in few bits, `copy_of_weights`. Small values (the settings of that batch, the
cut into stages) are in each rank's `extra`. A resumed run makes the same cut and goes on to the same bits. After the
last step of a run, no gradient is pending.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.checkpoint import api, commit, sidecar, state, storage
from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import make_mesh
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config import JobError, ScheduleConfig
from laconic.cyclic import CyclicDataParallel
from laconic.data.batches import Batch
from laconic.hf.causal_lm import cut_causal_lm
from laconic.hf.layers import base_model
from laconic.models.build import materialize
from laconic.store.folder import damage
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_stage_optimizer
from laconic.strategies.stepper import (
    NotFiniteError,
    Save,
    Setup,
    Stepper,
    StepResult,
    checkpoints_to_load,
    loss_of_logits,
)


def num_workers(schedule: ScheduleConfig, ranks: RankInfo) -> int:
    """The number of workers of this launch, which is also the number of stages; 0 without a cyclic schedule.

    Raises:
        JobError: the number of ranks does not fit schedule.states and schedule.workers.
    """
    launched = ranks.world_size
    if not schedule.is_cyclic:
        return 0
    if launched == 1:
        if schedule.workers is None:
            raise JobError(
                "schedule.kind = 'cyclic' and one rank: set schedule.workers to the micro-batches to interleave on its "
                "device, or start more ranks"
            )
        return schedule.workers
    if schedule.states == "shared":
        workers = (isqrt(8 * launched + 1) - 1) // 2
        if (schedule.workers or workers) != workers or workers * (workers + 1) // 2 != launched:
            wanted = schedule.workers or workers + 1
            raise JobError(
                f"schedule.states = 'shared' needs N (N + 1) / 2 ranks for N workers, and schedule.workers = "
                f"{schedule.workers} with {launched} ranks does not fit; start {wanted * (wanted + 1) // 2} ranks"
                + (f" for {wanted} workers" if schedule.workers is None else ", or leave schedule.workers out")
            )
        return workers
    if schedule.workers not in (None, launched):
        raise JobError(
            f"schedule.workers = {schedule.workers}, but there are {launched} ranks, and each is a worker; start "
            f"{schedule.workers} ranks (or one, which interleaves them), or leave schedule.workers out"
        )
    return launched


class CyclicStepper(Stepper):
    """A `Stepper` of workers that run one after the other."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        """Fill in `model`'s weights and cut it, as in the checkpoint to go on from, if there is one. Collective."""
        ranks, device, schedule = setup.ranks, setup.device, setup.schedule
        materialize(model, setup.model, device)
        self.module = model
        self.num_workers = num_workers(schedule, ranks)
        resumes = setup.train.resume != "never" and ranks.is_main
        saved = RankGroup().broadcast(newest_cut(checkpoints_to_load(setup.train)) if resumes else None)
        blocks_by_stage = saved_cut(saved, self.num_workers)
        shape = setup.train.micro_batch_size, setup.data.sequence_length
        self.stages = self._cut(schedule.cut_by, blocks_by_stage, shape)
        self.about = f"cut into stages of {[stage.num_blocks for stage in self.stages]} blocks"
        mesh = make_mesh(device.type, (ranks.world_size,)) if ranks.world_size > 1 else None
        self.run = CyclicDataParallel(
            self.stages,
            loss_of_logits(model),
            make_stage_optimizer(setup.optimizer),
            mesh,
            max_grad_norm=setup.optimizer.max_grad_norm or None,
            **schedule.pick("rule", "states", "cache", "wire", "stagger"),
        )
        self.optimizer: torch.optim.Optimizer = self.run.optimizer
        is_one_worker = mesh is not None and schedule.states != "shared"
        self.workers = range(ranks.rank, ranks.rank + 1) if is_one_worker else range(self.num_workers)
        self.peers = range(self.num_workers)

    def _cut(self, cut_by: str | None, blocks_by_stage: list[int] | None, shape: tuple[int, int]) -> list[Any]:
        device = next(self.module.parameters()).device
        example = torch.arange(shape[0] * shape[1], device=device).reshape(shape)
        example %= base_model(self.module).get_input_embeddings().num_embeddings
        by: Any = cut_by
        if blocks_by_stage is not None:  # with these costs the stages are equal, so `cut` makes the same stages
            by = [1 / count for count in blocks_by_stage for _ in range(count)]
        return list(cut_causal_lm(self.module, self.num_workers, example=example, by=by))

    def step(self, batches: Sequence[Batch], *, is_last: bool) -> StepResult:
        """See `Stepper.step`."""
        micro_batches = [(batch.input_ids, batch) for batch in batches]
        loss = self.run.step(micro_batches if len(self.workers) > 1 else micro_batches[0])
        value = None if loss is None else float(loss)
        if value is not None and not math.isfinite(value):
            raise NotFiniteError(
                loss=value,
                grad_norm=None,
                is_on_all_ranks=False,
                weights="lost: gradients of steps {step} and after were on their way",
            )
        if is_last:
            self.run.drain()
        return StepResult(loss=value, grad_norm=None)

    def consistent(self) -> AbstractContextManager[Any]:
        """See `Stepper.consistent`. Inside, all stages have one version."""
        return self.run.consistent_parameters()

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See `Stepper.save`."""
        save_stages(self.run, self.module, save, extra)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Stepper.load`."""
        return load_stages(self.run, self.module, folder)

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See `Stepper.traffic`."""
        return self.run.traffic.snapshot()

    def resting_bytes(self) -> int:
        """See `Stepper.resting_bytes`."""
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self.module.parameters()}
        return sum(storages.values()) + sum(state_nbytes(optimizer) for optimizer in self.run.optimizer.by_stage)

    def close(self) -> None:
        """See `Stepper.close`."""
        self.run.close()


# -- checkpoints: [Note: Checkpoints of the cyclic schedule] -----------------------------------------------------------

_PENDING, _COPY = "pending_gradient", "copy_of_weights"


def save_stages(run: CyclicDataParallel, model: nn.Module, write: Save, extra: dict[str, Any]) -> None:
    """Call `write` with the state of `run` under the names of `model`, and with `extra`. Collective."""
    states = run.state_dict()
    own_values = {key: value for key, value in states.items() if not isinstance(value, Tensor)}
    parts = RankGroup().gather(sidecar.encode(own_values))
    values = {key: value for part in parts for key, value in sidecar.decode(part).items()}
    tensors: dict[Tensor, dict[str, Tensor]] = {}
    for stage, name, parameter in _trainable(run):
        if own := _tensors_of(states, stage, name, is_pending=values["is_pending"]):
            tensors[parameter] = own
    schedule = {"cut": [stage.num_blocks for stage in run.stages], "values": values}
    with run.consistent_parameters():
        optimizer = _StageStates(run.optimizer.param_groups, tensors)
        write(model=model, optimizer=optimizer, extra={**extra, "schedule": schedule})


def load_stages(run: CyclicDataParallel, model: nn.Module, folder: Path) -> dict[str, Any] | None:
    """Load the newest intact checkpoint into `run`; return its `extra`, or None if there is no checkpoint. Collective.

    Raises:
        JobError: the checkpoint has another number of stages, or no stages.
    """
    with run.consistent_parameters():
        found = api.load_newest(folder, model=model, optimizer=None)
        if found is None:
            return None
        checkpoint_folder, extra = found
        saved_cut(extra, len(run.stages))
        states = _read_states(run, model, extra["schedule"]["values"], checkpoint_folder)
    run.load_state_dict(states)
    return extra


def newest_cut(checkpoints: Path) -> dict[str, Any] | None:
    """The step, and the cut if there is one, of the newest checkpoint whose file of rank 0 is intact; else None."""
    for candidate in commit.candidates(checkpoints):
        files = candidate.manifest.files if candidate.manifest else ()
        own = [file for file in files if file.name == sidecar.name(0)]
        if candidate.manifest and own and not damage(candidate.folder, own):
            extra = sidecar.read(candidate.folder)["extra"]
            schedule = {"schedule": {"cut": extra["schedule"]["cut"]}} if "schedule" in extra else {}
            return {"step": candidate.manifest.step, **schedule}
    return None


def saved_cut(saved: dict[str, Any] | None, workers: int) -> list[int] | None:
    """The number of blocks of each stage in a checkpoint, whose `extra` or cut is `saved`; None without a checkpoint.

    Raises:
        JobError: the checkpoint's run had no cyclic schedule, or another number of workers.
    """
    if saved is None:
        return None
    if "schedule" not in saved:
        problem = "was written with schedule.kind = 'simultaneous', so its optimizer has no stages; keep that kind"
    else:
        blocks = list(saved["schedule"]["cut"])
        if len(blocks) == workers:
            return blocks
        problem = f"has {len(blocks)} stages, and this launch {workers} workers; go on with {len(blocks)} workers"
    advice = "or export the model and begin anew from it (model.path)"
    raise JobError(f"the checkpoint of step {saved['step']} {problem}, {advice}")


class _StageStates(torch.optim.Optimizer):
    """This rank's part of the state of all stages' optimizers, in one optimizer, as a checkpoint expects it."""

    def __init__(self, groups: list[dict[str, Any]], tensors: dict[Tensor, dict[str, Tensor]]) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.state.update(tensors)


def _trainable(run: CyclicDataParallel) -> Iterator[tuple[int, str, nn.Parameter]]:
    """All trainable parameters, as (stage, name in the stage, parameter)."""
    for stage, module in enumerate(run.stages):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield stage, name, parameter


def _tensors_of(states: dict[str, Any], stage: int, name: str, *, is_pending: bool) -> dict[str, Tensor]:
    """The optimizer's tensors of one parameter in the state of a run, and its pending gradient and copy, if any."""
    prefix, gradient = f"stages.{stage}.optimizer.{name}.", f"stages.{stage}.gradient.{name}"
    own = {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix)}
    if is_pending and gradient in states:
        own[_PENDING] = states[gradient]
    if (copy := f"stages.{stage}.copy.{name}") in states:
        own[_COPY] = states[copy]
    return {key: value for key, value in own.items() if isinstance(value, Tensor)}


def _read_states(run: CyclicDataParallel, model: nn.Module, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The state of a run from the checkpoint in `folder`, from which `model` has been loaded already."""
    states: dict[str, Any] = {**run.blank_state_dict(), **values}
    for key in ("settings", "pending_settings"):
        states[key] = _with_tuples(run.optimizer.settings(), values[key])
    for stage, module in enumerate(run.stages):
        for name, parameter in module.named_parameters():
            states[f"stages.{stage}.parameters.{name}"] = parameter.detach().clone()
        for name, buffer in module.named_buffers():
            states[f"devices.{dist.get_rank()}.stages.{stage}.buffers.{name}"] = buffer.clone()
    names = {id(parameter): name for name, parameter in state.named_parameters(model).items()}
    wanted: dict[str, Tensor] = {}
    for stage, name, parameter in _trainable(run):
        if not values.get("has_copies"):  # weights crossed exactly in the run that was saved
            states.pop(f"stages.{stage}.copy.{name}", None)
        own = _tensors_of(states, stage, name, is_pending=values["is_pending"])
        wanted |= {f"optim.state.{names[id(parameter)]}.{key}": value for key, value in own.items()}
    storage.load(wanted, folder, offline=True)
    return states


def _with_tuples(current: Any, saved: Any) -> Any:
    """Saved settings by stage and group. Lists become tuples where `current` has tuples, which JSON has not."""
    return [
        [
            {key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved_group.items()}
            for group, saved_group in zip(groups, saved_groups, strict=True)
        ]
        for groups, saved_groups in zip(current, saved or current, strict=True)
    ]
