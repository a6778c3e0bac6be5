"""The stepper of ranks that run at the same time, under any value of shard.strategy, with islands or without.

[Note: Non-finite losses]
A loss that is not finite on one rank makes the gradient norm of its whole island not finite. All ranks of the island
see the norm, so none of them takes the optimizer's step, and no message is needed. Other islands do not see the norm,
nor do workers of the cyclic schedule. They end as after any failure: [Note: Failing together] in comm/failure.py.

[Note: Loss scaling]
Small gradients vanish in float16. So the loss of every micro-batch is multiplied by a scale, and the gradients are
divided by it before they are clipped. If gradients overflow, their global norm is not finite. All ranks see this norm,
so all of them skip the step and halve the scale, without a message. `torch.amp.GradScaler` looks at each rank's own
gradients instead, and ranks would have to agree. A skipped step uses up its rows, but the learning-rate schedule waits:
it counts the optimizer's steps. If the scale has fallen to 1 and gradients still overflow, it is not the scale's fault,
and training ends.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import laconic.checkpoint
from laconic import registry
from laconic.comm.traffic import Snapshot
from laconic.config import OptimizerConfig
from laconic.data.batches import Batch
from laconic.islands.exchange import SyncReport
from laconic.islands.local_steps import LocalSteps
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Placement
from laconic.strategies.islands import num_islands, num_launches, run_id_of
from laconic.strategies.memory import local_nbytes, state_nbytes
from laconic.strategies.optimizers import make_optimizer
from laconic.strategies.parallelize import parallelize
from laconic.strategies.stepper import NotFiniteError, Save, Setup, Stepper, StepResult

_SMALLEST_SCALE = 1.0


@dataclass(kw_only=True)
class LossScale:
    """The scale and its history, with the rule of `torch.amp.GradScaler`: [Note: Loss scaling]."""

    scale: float
    growth_steps: int
    """The steps in a row without overflow that double the scale."""
    good_steps: int = 0
    """The steps without overflow since the scale last changed."""
    num_skipped: int = 0
    """The steps of the whole run that were skipped."""

    @property
    def is_exhausted(self) -> bool:
        """True if a smaller scale would not help."""
        return self.scale <= _SMALLEST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Note a step whose gradients overflowed, and which was skipped, or one whose gradients did not."""
        if overflowed:
            self.num_skipped += 1
            self.good_steps = 0
            self.scale = max(self.scale / 2, _SMALLEST_SCALE)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.scale *= 2
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        """The part that a checkpoint needs: what changes."""
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}


class Simultaneous(Stepper):
    """A `Stepper` for ranks that all run forward and backward at the same time."""

    _make_optimizer: Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer] = staticmethod(make_optimizer)

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        sync, optimizer, ranks = setup.sync, setup.optimizer, setup.ranks
        self.module = model
        mesh = self._place(model, setup)
        self._is_placed_by_itself = mesh is not None and setup.shard.policy.cache.where == "auto"
        self._shape = [ranks.num_nodes, ranks.num_local]
        self._syncs_always = registry.named(setup.shard.strategy).reduces_always
        self.optimizer = self._make_optimizer(model, optimizer)
        self.local: LocalSteps | None = None
        """The wrapper of the optimizer that synchronises islands; None without islands."""
        self._has_islands = sync.is_local
        if sync.is_local and mesh is not None:
            run_id = run_id_of(sync, Path(setup.train.output))
            self.local = LocalSteps(  # islands start from equal parameters, or from their last sync
                model, self.optimizer, mesh=mesh, policy=sync.policy, total_steps=setup.train.steps, run_id=run_id
            )
        self._ranks, self._num_launches = ranks, num_launches(sync)
        self.num_workers, self.workers = ranks.world_size * self._num_launches, range(ranks.rank, ranks.rank + 1)
        ranks_per_island = ranks.world_size // num_islands(sync, ranks)
        first_peer = ranks.rank // ranks_per_island * ranks_per_island
        self.peers = range(first_peer, first_peer + ranks_per_island)
        self.steps_per_sync = self.local.schedule.interval if self.local else None
        self.recovered_steps = self.local.steps if self.local else 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_grad_norm = optimizer.max_grad_norm or math.inf  # an infinite limit only measures
        self._audit_every, self._num_steps = setup.shard.policy.audits.interval, 0
        self._loss_scale: LossScale | None = None
        if setup.shard.policy.precision.param_dtype == "float16":
            self._loss_scale = LossScale(scale=optimizer.loss_scale, growth_steps=optimizer.loss_scale_growth_steps)

    def _place(self, model: nn.Module, setup: Setup) -> DeviceMesh | None:
        """Shard the model. Returns the mesh of islands, nodes and local ranks under the engine, else None."""
        self._forward_module, mesh = parallelize(model, setup)
        self._engine: Any = model if mesh is not None else None
        return mesh

    def enter(self, step: int) -> int:
        """See `Stepper.enter`. The rows that this island trains on follow from its slot."""
        if self._num_launches == 1 or self.local is None:
            return step
        entered, ranks = self.local.enter(), self._ranks
        if self.local.slot >= self._num_launches and ranks.is_main:
            warnings.warn(
                f"more than sync.islands = {self._num_launches} islands train, so this one, in slot {self.local.slot}, "
                "trains on the rows of another one",
                stacklevel=2,
            )
        first = self.local.slot % self._num_launches * ranks.world_size
        self.workers = range(first + ranks.rank, first + ranks.rank + 1)
        self.peers = range(first, first + ranks.world_size)
        return entered

    def begin(self) -> None:
        """See `Stepper.begin`."""
        super().begin()
        if self._engine is not None:
            self._engine.reset_peak_memory()

    def step(self, batches: Sequence[Batch], *, is_last: bool) -> StepResult:
        """See `Stepper.step`."""
        self._audit(batches[0])
        scale = self._loss_scale.scale if self._loss_scale else None
        mean_loss = self._backward(batches, scale)
        grad_norm = self._clip()
        if self._skips(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            return StepResult(loss=mean_loss, grad_norm=grad_norm, loss_scale=scale, skipped_steps=self.num_skipped)
        if not math.isfinite(grad_norm) or not math.isfinite(mean_loss):  # see [Note: Non-finite losses]
            raise NotFiniteError(
                loss=mean_loss,
                grad_norm=grad_norm,
                is_on_all_ranks=not math.isfinite(grad_norm) and not self._has_islands,
                weights="as after step {step}",
            )
        syncs = self._update(self._targets(batches), is_last=is_last)
        self.optimizer.zero_grad(set_to_none=True)
        skipped = None if scale is None else self.num_skipped
        return StepResult(loss=mean_loss, grad_norm=grad_norm, syncs=syncs, loss_scale=scale, skipped_steps=skipped)

    def _backward(self, batches: Sequence[Batch], scale: float | None) -> float:
        """Leave the gradients of the mean loss, times `scale`, in `.grad`; return the loss."""
        losses = []
        for index, batch in enumerate(batches):
            self._set_gradient_sync(index == len(batches) - 1)
            loss = self.loss(batch) / len(batches)
            (loss if scale is None else loss * scale).backward()
            losses.append(loss.detach())
        return float(sum(losses))

    def loss(self, batch: Batch) -> Tensor:
        """See `Stepper.loss`."""
        return self._forward_module(**batch.arguments(), use_cache=False).loss

    def _audit(self, batch: Batch) -> None:
        """Let ranks repeat each other's micro-batch if it is time: see `laconic.audit`."""
        interval, self._num_steps = self._audit_every, self._num_steps + 1
        if interval and (self._num_steps - 1) % interval == 0:
            laconic.audit(self.module, batch.arguments(), lambda model, given: model(**given, use_cache=False).loss)

    def _set_gradient_sync(self, is_last: bool) -> None:
        """Choose whether the next backward reduces gradients over ranks, as the last backward of a step must."""
        if isinstance(self._forward_module, DistributedDataParallel):
            self._forward_module.require_backward_grad_sync = is_last  # as DDP.no_sync() does
            return
        self.module.set_requires_gradient_sync(is_last or self._syncs_always)  # FSDP2 and laconic both have this method
        if self._syncs_always and self._engine is None:
            self.module.set_requires_all_reduce(is_last)  # over replicas, if there are any

    def _skips(self, grad_norm: float) -> bool:
        """Whether this step's gradients overflowed and a smaller scale may help: [Note: Loss scaling]."""
        if self._loss_scale is None or (not math.isfinite(grad_norm) and self._loss_scale.is_exhausted):
            return False
        self._loss_scale.update(overflowed=not math.isfinite(grad_norm))
        return not math.isfinite(grad_norm)

    def _clip(self) -> float:
        """Clip the gradients; return their global norm before clipping, the same on every rank of an island."""
        if self._loss_scale is not None:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_mul_(gradients, 1 / self._loss_scale.scale)
        norm = self._clip_all()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _clip_all(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)

    def _targets(self, batches: Sequence[Batch]) -> int:
        """The targets of all micro-batches of this island: [Note: Mean over tokens] in data/batches.py."""
        first = batches[0]
        per_micro_batch = first.labels.numel() if first.num_items is None else float(first.num_items)
        return max(1, round(per_micro_batch * len(batches) * len(self.peers)))

    def _update(self, num_targets: int, *, is_last: bool) -> tuple[SyncReport, ...]:
        """Take the optimizer's step; return the syncs of islands that ended with it."""
        if self.local is None:
            self.optimizer.step()
            return ()
        self.local.step(tokens=num_targets)
        if is_last:
            self.local.finish()
        return tuple(self.local.reports)

    def consistent(self) -> AbstractContextManager[Any]:
        """See `Stepper.consistent`. Inside, a model with islands has the outer parameters."""
        return self.local.outer_parameters() if self.local else contextlib.nullcontext()

    def placements(self) -> Mapping[str, Placement]:
        """See `Stepper.placements`."""
        if not self._is_placed_by_itself or not self._engine.is_placed:
            return {}
        return dict(self._engine.placements())

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See `Stepper.save`."""
        if placements := self.placements():
            units = {name: asdict(placement) for name, placement in placements.items()}
            extra = {**extra, "placements": {"cluster": self._shape, "units": units}}
        if self._loss_scale is not None:
            extra = {**extra, "loss_scale": self._loss_scale.state()}
        save(model=self.module, optimizer=self.optimizer, local_steps=self.local, extra=extra)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Stepper.load`."""
        extra = laconic.checkpoint.load_checkpoint(
            folder, model=self.module, optimizer=self.optimizer, local_steps=self.local
        )
        if self._loss_scale is not None and extra is not None and "loss_scale" in extra:
            self._loss_scale = replace(self._loss_scale, **extra["loss_scale"])
        if self._is_placed_by_itself and extra is not None:
            self._place_again(extra.get("placements"))
        return extra

    def _place_again(self, saved: Any) -> None:
        """Let units rest where the saved run has chosen, if it had the same units on as many nodes and ranks."""
        if saved is None or saved["cluster"] != self._shape or set(saved["units"]) != set(self._engine.placements()):
            return
        self._engine.set_placements({name: Placement(**values) for name, values in saved["units"].items()})

    def close(self) -> None:
        """See `Stepper.close`."""
        if self.local is not None:
            self.local.leave()

    @property
    def num_skipped(self) -> int:  # type: ignore[override]  # read-only here
        """See `Stepper.num_skipped`."""
        return 0 if self._loss_scale is None else self._loss_scale.num_skipped

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See `Stepper.traffic`. Bytes that islands exchange between two steps belong to the later step."""
        now = None if self._engine is None else self._engine.traffic.snapshot()
        if now is None or before is None or self.local is None:
            return now
        sizes = {key: before.sizes.get(key, 0) if key[1] == "outer" else size for key, size in now.sizes.items()}
        return replace(now, sizes=sizes)

    def memory(self) -> Ledger | None:
        """See `Stepper.memory`."""
        return None if self._engine is None else self._engine.memory()

    def resting_bytes(self) -> int:
        """See `Stepper.resting_bytes`."""
        memory = self.memory()
        held = (parameter for parameter in self.module.parameters() if not parameter.is_meta)
        weights = memory.device_bytes if memory else local_nbytes(held)
        return weights + state_nbytes(self.optimizer) + getattr(self.optimizer, "table_nbytes", 0)
