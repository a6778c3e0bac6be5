"""The state of a run between two batches, drained or not.

[Note: Snapshot of a run]
After T batches of a staggered run, some workers will use version T - 1 of a stage in the next batch and others version
T, which perhaps no device has yet. But one device has version T - 1, or can make it from a gradient that has arrived,
and no worker needs an older version. So a snapshot holds
  - version T - 1 of every stage, with its optimizer state,
  - the total gradient of batch T - 1, which makes version T (it is *pending*),
  - the hyper-parameters of batch T - 1, and its global norm if the run uses it,
  - the copies of version T - 1, if workers have such: [Note: Exact versions] in coding.py.
One device saves each stage: its owner or, if stages are shared, the first device that has used the version.
A run that begins from a snapshot has version -1 and a pending gradient: see [Note: Messages of a batch]. Without
stagger (`dp`) no worker needs version T - 1 again, and the snapshot holds version T alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.cyclic.optimizers import copied
from laconic.cyclic.program import norm_key
from laconic.cyclic.stages import as_part_of
from laconic.cyclic.worker import Worker


class Snapshots:
    """Saves and loads the state of the run of `worker`; see [Note: Snapshot of a run].

    Tensors are named by stage: `stages.0.parameters.NAME`, `stages.0.copy.NAME`, `stages.0.gradient.NAME`,
    `stages.0.optimizer.NAME.KEY`; buffers, which differ between devices, also by device:
    `devices.1.stages.0.buffers.NAME`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._placement, self._schedule = worker, worker.placement, worker.schedule

    @property
    def _version(self) -> int:
        """The version that a snapshot holds, counted in this run."""
        worker = self._worker
        if worker.batch == 0:
            return self._placement.first_version
        return worker.batch - 1 if self._schedule.rule.is_staggered else worker.batch

    @property
    def _is_pending(self) -> bool:
        """Whether the gradient of the last batch is not in that version."""
        return self._version < self._worker.batch

    def advance(self) -> int:
        """Bring the stages that this device saves to the snapshot's version; return it, counted over all runs."""
        worker, target = self._worker, self._version
        for stage in range(self._schedule.num_stages):
            if self.weights_device(stage) == worker.number:
                while (version := self._placement.version[stage]) < target:
                    # The total stays, since the program will take it and see that it is applied.
                    worker.apply(stage, worker.total(stage, version))
        return worker.num_batches - worker.batch + target

    def weights_device(self, stage: int) -> int:
        """The device that saves the parameters and the optimizer state of a stage."""
        schedule = self._schedule
        if schedule.has_device_per_worker:
            return schedule.rule.owner(stage)
        # The first that has used the version: worker N means worker 0 of the batch after.
        return schedule.device(schedule.rule.switch[stage], stage, self._worker.batch - 1)

    def _gradient_device(self, stage: int) -> int:
        """The device that saves the pending gradient of a stage: the one that has added it up."""
        schedule = self._schedule
        if schedule.has_device_per_worker:
            return schedule.rule.owner(stage)
        return schedule.device(schedule.num_stages - 1, stage, self._worker.batch - 1)

    def state_dict(self) -> dict[str, Any]:
        """See CyclicDataParallel.state_dict."""
        self.advance()
        worker, placement = self._worker, self._placement
        worker.wire.forget()
        state: dict[str, Any] = {
            "num_batches": worker.num_batches,
            "is_pending": self._is_pending,
            "settings": placement.optimizers.settings(),
            "pending_settings": worker.settings[self._version] if self._is_pending else None,
            **({"pending_square": self._pending_square()} if self._schedule.has_norm else {}),
            **({"has_copies": True} if worker.wire.has_copies else {}),
        }
        for stage in range(self._schedule.num_stages):
            if self.weights_device(stage) == worker.number:
                state |= self._named(stage, "parameters", placement.exact(stage))
                if worker.wire.has_copies:
                    state |= self._named(stage, "copy", placement.buffers[stage])
                state |= self._frozen(stage)
                by_parameter = placement.optimizers.by_stage[stage].state
                state |= self._optimizer_state(stage, [by_parameter.get(p, {}) for p in placement.parameters[stage]])
            if self._gradient_device(stage) == worker.number:
                total = self._empty(stage)
                if self._is_pending:
                    total = worker.total(stage, self._version)
                state |= self._named(stage, "gradient", total)
        return state | self._buffers()

    def _pending_square(self) -> float | None:
        return self._worker.square(self._version).item() if self._is_pending else None

    def blank_state_dict(self) -> dict[str, Any]:
        """See CyclicDataParallel.blank_state_dict."""
        settings = self._placement.optimizers.settings()
        state: dict[str, Any] = {
            "num_batches": 0,
            "is_pending": False,
            "settings": settings,
            "pending_settings": settings,
            **({"pending_square": None} if self._schedule.has_norm else {}),
        }
        for stage in range(self._schedule.num_stages):
            if self._worker.number in self._schedule.devices_of(stage):
                state |= {key: torch.empty_like(value) for key, value in self._frozen(stage).items()}
            if stage in self._placement.held:
                state |= self._named(stage, "parameters", self._empty(stage))
                if self._worker.wire.has_copies:
                    state |= self._named(stage, "copy", self._empty(stage))
            if stage in self._placement.updated:
                state |= self._named(stage, "gradient", self._empty(stage))
                state |= self._optimizer_state(stage, [])
        return state | {key: torch.empty_like(value) for key, value in self._buffers().items()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the state lacks an entry of `blank_state_dict`, or has one of another shape."""
        for key, blank in self.blank_state_dict().items():
            if key not in state:
                if _is_copy(key):  # weights crossed exactly in the run that was saved
                    continue
                raise ValueError(
                    f"the state has no {key!r}; it must hold all ranks' parts, of a model with these "
                    f"{self._schedule.num_stages} stages: load it into blank_state_dict() with "
                    "torch.distributed.checkpoint"
                )
            if isinstance(blank, Tensor) and blank.shape != state[key].shape:
                raise ValueError(
                    f"{key!r} has shape {tuple(state[key].shape)} in the state, but {tuple(blank.shape)} here; cut the "
                    "model as it was cut when the state was saved"
                )

    def load(self, state: dict[str, Any]) -> None:
        """Begin a run from the state, after a drain."""
        worker, placement = self._worker, self._placement
        worker.wire.forget()
        worker.num_batches = state["num_batches"]
        worker.begin_run(is_pending=state["is_pending"])
        if state["is_pending"]:
            worker.settings[-1] = state["pending_settings"]
        if self._schedule.has_norm and state["is_pending"]:
            square = torch.tensor([state["pending_square"]], dtype=torch.float64, device=placement.device)
            worker.links.put(norm_key(self._schedule, -1), square.view(torch.uint8))
        has_copies, own = worker.wire.has_copies and state.get("has_copies", False), self._buffers()
        for stage in range(self._schedule.num_stages):
            placement.optimizers.restore(stage, state["settings"][stage])
            if stage in placement.held:
                copy = self._packed(state, stage, "copy") if has_copies else None
                placement.load(stage, self._packed(state, stage, "parameters"), copy)
            if stage in placement.updated:
                if state["is_pending"]:
                    worker.links.put(worker.total_key(stage, -1), self._packed(state, stage, "gradient"))
                self._load_optimizer_state(state, stage)
            own |= self._frozen(stage)
        for key, value in own.items():
            if key in state:
                value.copy_(state[key])

    def _packed(self, state: dict[str, Any], stage: int, content: str) -> Tensor:
        buffer = self._empty(stage)
        for key, view in self._named(stage, content, buffer).items():
            view.copy_(state[key])
        return buffer

    def _load_optimizer_state(self, state: dict[str, Any], stage: int) -> None:
        optimizer_state = self._placement.optimizers.by_stage[stage].state
        optimizer_state.clear()
        if not state[f"stages.{stage}.has_stepped"]:
            return
        for name, parameter in zip(self._placement.names[stage], self._placement.parameters[stage], strict=True):
            prefix = f"stages.{stage}.optimizer.{name}."
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            optimizer_state[parameter] = {key: copied(value) for key, value in own.items()}

    def _empty(self, stage: int) -> Tensor:
        return self._placement.layouts[stage].empty(self._placement.device)

    def _named(self, stage: int, content: str, buffer: Tensor) -> dict[str, Tensor]:
        placement = self._placement
        named = zip(
            placement.names[stage], placement.parameters[stage], placement.layouts[stage].views(buffer), strict=True
        )
        return {f"stages.{stage}.{content}.{name}": as_part_of(parameter, view) for name, parameter, view in named}

    def _frozen(self, stage: int) -> dict[str, Tensor]:
        named = self._worker.stages[stage].named_parameters()
        return {f"stages.{stage}.parameters.{name}": p.data for name, p in named if not p.requires_grad}

    def _optimizer_state(self, stage: int, held: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of a stage's optimizer, by name; `held` has it by parameter. Before the first step it is zeros."""
        has_stepped = any(held)
        blank = list(self._named(stage, "parameters", self._empty(stage)).values())
        by_parameter = held if has_stepped else self._placement.optimizers.blank_state(blank)
        named = zip(self._placement.names[stage], by_parameter, strict=True)
        return {f"stages.{stage}.has_stepped": has_stepped} | {
            f"stages.{stage}.optimizer.{name}.{key}": value for name, own in named for key, value in own.items()
        }

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers of the stages that run here."""
        number = self._worker.number
        return {
            f"devices.{number}.stages.{stage}.buffers.{name}": buffer
            for stage, module in enumerate(self._worker.stages)
            if number in self._schedule.devices_of(stage)
            for name, buffer in module.named_buffers()
        }


def _is_copy(key: str) -> bool:
    """Whether an entry of a state is a worker's copy of a parameter."""
    return key.startswith("stages.") and key.split(".")[2] == "copy"
