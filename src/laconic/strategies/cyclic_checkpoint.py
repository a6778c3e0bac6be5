"""Checkpoints of the cyclic schedule, in the format of every other run.

[Note: Checkpoints of the cyclic schedule]
A checkpoint holds the model under its ordinary names, so that export and `load_dcp` need not know about stages. In the
middle of a run, it is the newest version that all stages can have, without the gradient of the last batch. That
gradient is stored as one more state of the optimizer, `pending_gradient`. Small values (the settings of that batch, the
cut into stages) are in each rank's `extra`. A resumed run makes the same cut and goes on to the same bits. After the
last step of a run, no gradient is pending.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.checkpoint import api, commit, sidecar, state, storage
from laconic.comm.agreement import RankGroup
from laconic.config import JobError
from laconic.cyclic import CyclicDataParallel
from laconic.store.folder import damage
from laconic.strategies.stepper import Save

_PENDING = "pending_gradient"


def save(run: CyclicDataParallel, model: nn.Module, write: Save, extra: dict[str, Any]) -> None:
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


def load(run: CyclicDataParallel, model: nn.Module, folder: Path) -> dict[str, Any] | None:
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
    """The optimizer's tensors of one parameter in the state of a run, and its pending gradient if there is one."""
    prefix, gradient = f"stages.{stage}.optimizer.{name}.", f"stages.{stage}.gradient.{name}"
    own = {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix)}
    if is_pending and gradient in states:
        own[_PENDING] = states[gradient]
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
        if f"stages.{stage}.gradient.{name}" in states:  # only on ranks that update the stage
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
