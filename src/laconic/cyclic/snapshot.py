"""The state of a run between two batches, drained or not.

[Note: What a run in mid-air is]
After T batches of a run, version T - 1 of every stage is complete somewhere or can be made from what has arrived, and
nobody will need an older one: in the next batch stale workers use T - 1 and fresh ones T. So the state is version T - 1
with its optimizer state, the total gradient of batch T - 1, which makes version T, and that batch's settings. One
device keeps each: for the parameters and optimizer state of a stage its owner, for shared stages the first device that
has used the version. A run that begins from it has version -1 and a gradient waiting, see messages.py. Under `dp`
nobody needs T - 1 again, and version T alone is the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laconic.cyclic.placement import trainable
from laconic.cyclic.worker import total_key

if TYPE_CHECKING:
    from laconic.cyclic.runtime import CyclicDataParallel


def settle(run: CyclicDataParallel) -> int:
    """Bring the stages kept here to the version that a snapshot has; returns it, counted over all runs."""
    target = _settled(run)
    for stage in range(len(run.stages)):
        if keeper_of_weights(run, stage) != run._links.mesh_rank:
            continue
        while (version := run._placement.version[stage]) < target:
            # It stays: the program will take it, and find it applied.
            total = run._links.peek(total_key(stage, version, len(run.stages)))
            run._worker.apply(stage, total.clone())
    return run.num_batches - run._batch + target


def _settled(run: CyclicDataParallel) -> int:
    """The version, counted in this run."""
    if run._batch == 0:
        return run._placement.first
    return run._batch - 1 if run.rule.is_staggered else run._batch


def _is_pending(run: CyclicDataParallel) -> bool:
    return _settled(run) < run._batch


def keeper_of_weights(run: CyclicDataParallel, stage: int) -> int:
    """The device that has the settled version of a stage first."""
    if run.schedule.states != "shared":
        return run.rule.owner(stage) if run.schedule.num_devices > 1 else 0
    if run._batch == 0:
        return run.schedule.devices_of(stage)[0]
    switch = run.rule.switch[stage]
    if switch < len(run.stages):
        return run.schedule.device(switch, stage, run._batch - 1)
    return run.schedule.device(0, stage, run._batch)


def _keeper_of_gradient(run: CyclicDataParallel, stage: int) -> int:
    if run.schedule.states == "shared" and run._batch > 0:
        return run.schedule.device(len(run.stages) - 1, stage, run._batch - 1)
    return keeper_of_weights(run, stage)


def _applied_here(run: CyclicDataParallel) -> list[int]:
    """The stages whose optimizer steps on this device."""
    number, stages = run._links.mesh_rank, range(len(run.stages))
    if run.schedule.states in ("replicated", "sharded"):
        return [stage for stage in stages if run.rule.owner(stage) == number]
    return list(run.schedule.stages_of(number))


# -- save --------------------------------------------------------------------------------------------------------------


def state_dict(run: CyclicDataParallel) -> dict[str, Any]:
    """See CyclicDataParallel.state_dict."""
    settle(run)
    number, waiting = run._links.mesh_rank, _settled(run)
    state: dict[str, Any] = {"num_batches": run.num_batches, "is_pending": _is_pending(run)}
    state["settings"] = run.optimizer.settings()
    state["pending_settings"] = run._worker.settings[waiting] if state["is_pending"] else None
    state.update(_norm(run))
    for stage in range(len(run.stages)):
        if keeper_of_weights(run, stage) == number:
            views = run._placement.layouts[stage].views(run._placement.buffers[stage])
            state.update(_named(run, stage, "parameters", views))
            state.update(_frozen(run, stage))
            state.update(_optimizer_state(run, stage))
        if _keeper_of_gradient(run, stage) == number:
            if state["is_pending"]:
                total = run._links.peek(total_key(stage, waiting, len(run.stages)))
            else:
                total = run._placement.layouts[stage].empty(run._placement.device)
            state.update(_named(run, stage, "gradient", run._placement.layouts[stage].views(total)))
    state.update(_buffers(run))
    return state


def _needs_norm(run: CyclicDataParallel) -> bool:
    """Everybody needs it who updates; to choose a loss scale, all do."""
    return run.schedule.has_norm and (run._worker.loss_scale is not None or bool(_applied_here(run)))


def _norm(run: CyclicDataParallel) -> dict[str, Any]:
    """Of the last batch, whose gradient may be waiting; and the scale of the next, see scaling.py."""
    if not _needs_norm(run):
        return {}
    worker, last = run._worker, run._batch - 1
    square = worker.square(last) if last >= 0 else worker.squares.get(-1)
    state: dict[str, Any] = {"pending_square": None if square is None else square.item()}
    if worker.loss_scale is not None:
        state["pending_scale"] = worker.loss_scale.by_batch.get(last)
        unseen = None
        if last >= 0:  # the next batch will begin with seeing the one before last
            unseen = worker.square(last - 1) if last >= 1 else worker.squares.get(-1)
        now = (worker.loss_scale.scale, worker.loss_scale.good_batches)
        state["loss_scale"] = now if unseen is None else worker.loss_scale.after(unseen)
    return state


def _named(run: CyclicDataParallel, stage: int, what: str, tensors: list[Tensor]) -> dict[str, Any]:
    names = [name for name, p in run.stages[stage].named_parameters() if p.requires_grad]
    return {f"stages.{stage}.{what}.{name}": tensor for name, tensor in zip(names, tensors, strict=True)}


def _frozen(run: CyclicDataParallel, stage: int) -> dict[str, Tensor]:
    named = run.stages[stage].named_parameters()
    return {f"stages.{stage}.parameters.{name}": p.data for name, p in named if not p.requires_grad}


def _optimizer_state(run: CyclicDataParallel, stage: int) -> dict[str, Any]:
    """What the optimizer holds per parameter; zeros, and a note that says so, where it has not stepped yet."""
    optimizer, blank = run.optimizer.by_stage[stage], _blank_optimizer_state(run, stage)
    names = [name for name, p in run.stages[stage].named_parameters() if p.requires_grad]
    held = [optimizer.state.get(p, {}) for p in trainable(run.stages[stage])]
    state: dict[str, Any] = {f"stages.{stage}.has_stepped": any(held)}
    for name, own, zeros in zip(names, held, blank, strict=True):
        for key, value in (own if any(held) else zeros).items():
            state[f"stages.{stage}.optimizer.{name}.{key}"] = value
    return state


def _blank_optimizer_state(run: CyclicDataParallel, stage: int) -> list[dict[str, Any]]:
    """What the optimizer holds per parameter once it has stepped, of zeros: found by letting another one step."""
    views = run._placement.layouts[stage].views(run._placement.layouts[stage].empty(run._placement.device))
    parameters = [nn.Parameter(view) for view in views]
    optimizer = run.make_optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return [
        {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
        for p in parameters
    ]


def _buffers(run: CyclicDataParallel) -> dict[str, Any]:
    number = run._links.mesh_rank
    return {
        f"devices.{number}.stages.{stage}.buffers.{name}": buffer
        for stage in run.schedule.stages_of(number)
        for name, buffer in run.stages[stage].named_buffers()
    }


# -- load --------------------------------------------------------------------------------------------------------------


def blank_state_dict(run: CyclicDataParallel) -> dict[str, Any]:
    """See CyclicDataParallel.blank_state_dict."""
    device = run._placement.device
    settings = run.optimizer.settings()
    state: dict[str, Any] = {
        "num_batches": 0,
        "is_pending": False,
        "settings": settings,
        "pending_settings": settings,
    }
    state.update(dict.fromkeys(_norm(run)))
    for stage in range(len(run.stages)):
        layout = run._placement.layouts[stage]
        if run._links.mesh_rank in run.schedule.devices_of(stage):
            state.update({key: torch.empty_like(value) for key, value in _frozen(run, stage).items()})
        if stage in run._placement.held:
            state.update(_named(run, stage, "parameters", layout.views(layout.empty(device))))
        if stage in _applied_here(run):
            state.update(_named(run, stage, "gradient", layout.views(layout.empty(device))))
            state[f"stages.{stage}.has_stepped"] = False
            names = [name for name, p in run.stages[stage].named_parameters() if p.requires_grad]
            for name, zeros in zip(names, _blank_optimizer_state(run, stage), strict=True):
                state.update({f"stages.{stage}.optimizer.{name}.{key}": value for key, value in zeros.items()})
    state.update({key: torch.empty_like(value) for key, value in _buffers(run).items()})
    return state


def check(run: CyclicDataParallel, state: dict[str, Any]) -> None:
    """Raises: ValueError if something is missing, or of another shape."""
    for key, blank in blank_state_dict(run).items():
        if key not in state:
            raise ValueError(
                f"the state has no {key!r}; it must hold all ranks' parts, of a model with these {len(run.stages)} "
                "stages: load it into blank_state_dict() with torch.distributed.checkpoint"
            )
        if isinstance(blank, Tensor) and blank.shape != state[key].shape:
            raise ValueError(
                f"{key!r} has shape {tuple(state[key].shape)} in the state, but {tuple(blank.shape)} here; cut the "
                "model as it was when it was saved"
            )


def load(run: CyclicDataParallel, state: dict[str, Any]) -> None:
    """Begin a run from the state; nothing is under way."""
    placement, optimizer = run._placement, run.optimizer
    run.num_batches = state["num_batches"]
    run._restart(is_pending=state["is_pending"])
    if state["is_pending"]:
        run._worker.settings[-1] = state["pending_settings"]
    if _needs_norm(run) and state["pending_square"] is not None:
        run._worker.squares[-1] = torch.tensor(state["pending_square"], dtype=torch.float64, device=placement.device)
    if (scale := run._worker.loss_scale) is not None:
        scale.scale, scale.good_batches = state["loss_scale"]
        scale.by_batch = {-1: state["pending_scale"]}
    for stage, module in enumerate(run.stages):
        optimizer.restore(stage, state["settings"][stage])
        if stage in placement.held:
            placement.replace(stage, _packed(run, state, stage, "parameters"))
        if stage in _applied_here(run):
            if state["is_pending"]:
                run._links.put(total_key(stage, -1, len(run.stages)), _packed(run, state, stage, "gradient"))
            _load_optimizer_state(run, state, stage)
        here = {f"devices.{run._links.mesh_rank}.stages.{stage}.buffers.{n}": b for n, b in module.named_buffers()}
        for key, value in {**here, **_frozen(run, stage)}.items():
            if key in state:
                value.copy_(state[key])


def _packed(run: CyclicDataParallel, state: dict[str, Any], stage: int, what: str) -> Tensor:
    names = [name for name, p in run.stages[stage].named_parameters() if p.requires_grad]
    tensors = (state[f"stages.{stage}.{what}.{name}"] for name in names)
    return run._placement.layouts[stage].pack(tensors, run._placement.device)


def _load_optimizer_state(run: CyclicDataParallel, state: dict[str, Any], stage: int) -> None:
    optimizer = run.optimizer.by_stage[stage]
    optimizer.state.clear()
    if not state[f"stages.{stage}.has_stepped"]:
        return
    names = [name for name, p in run.stages[stage].named_parameters() if p.requires_grad]
    for name, parameter in zip(names, trainable(run.stages[stage]), strict=True):
        prefix = f"stages.{stage}.optimizer.{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        optimizer.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}
