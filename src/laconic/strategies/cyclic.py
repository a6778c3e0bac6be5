"""The stepper of jobs with schedule.kind = 'cyclic', whose workers run one after the other."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.cluster import make_mesh
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config import DataConfig, JobError, ScheduleConfig
from laconic.cyclic import CyclicDataParallel, cut
from laconic.data.batches import Batch
from laconic.hf.layers import base_model
from laconic.hf.models import materialize
from laconic.strategies import cyclic_checkpoint
from laconic.strategies.cyclic_metrics import DeviceTimeline
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_stage_optimizer
from laconic.strategies.stepper import NotFiniteError, Save, Setup, Stepper, StepResult


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

    def __init__(
        self, model: nn.Module, setup: Setup, schedule: ScheduleConfig, data: DataConfig, saved: dict[str, Any] | None
    ) -> None:
        """Fill in `model`'s weights and cut it. `saved` is the cut of a checkpoint to load, or None. Collective."""
        ranks, device = setup.ranks, setup.device
        materialize(model, setup.model, device)
        self.module = model
        self.num_workers = num_workers(schedule, ranks)
        blocks_by_stage = cyclic_checkpoint.saved_cut(saved, self.num_workers)
        shape = setup.train.micro_batch_size, data.sequence_length
        self.stages = self._cut(schedule.cut_by, blocks_by_stage, shape, is_packed=bool(data.packing))
        self.blocks_by_stage = [stage.num_blocks for stage in self.stages]
        mesh = make_mesh(device.type, (ranks.world_size,)) if ranks.world_size > 1 else None
        self.run = CyclicDataParallel(
            self.stages,
            _loss_fn(model),
            make_stage_optimizer(setup.optimizer),
            mesh,
            max_grad_norm=setup.optimizer.max_grad_norm or None,
            **schedule.pick("rule", "states", "stagger"),
        )
        self.optimizer: torch.optim.Optimizer = self.run.optimizer
        is_one_worker = mesh is not None and schedule.states != "shared"
        self.workers = range(ranks.rank, ranks.rank + 1) if is_one_worker else range(self.num_workers)
        self.peers = range(self.num_workers)

    def _cut(
        self, cut_by: str, blocks_by_stage: list[int] | None, shape: tuple[int, int], *, is_packed: bool
    ) -> list[Any]:
        device = next(self.module.parameters()).device
        example = torch.arange(shape[0] * shape[1], device=device).reshape(shape)
        example %= base_model(self.module).get_input_embeddings().num_embeddings
        inputs: Any = example
        if is_packed:  # an example must have all inputs of the batches
            inputs = (example, torch.arange(shape[1], device=device).expand(shape) % max(shape[1] // 2, 1))
            inputs = dict(zip(("input_ids", "position_ids"), inputs, strict=True))
        by: Any = cut_by
        if blocks_by_stage is not None:  # with these costs the stages are equal, so `cut` makes the same stages
            by = [1 / count for count in blocks_by_stage for _ in range(count)]
        return list(cut(self.module, self.num_workers, example=inputs, by=by))

    def step(self, batches: Sequence[Batch], *, is_last: bool) -> StepResult:
        """See `Stepper.step`."""
        micro_batches = [(_inputs(batch), batch) for batch in batches]
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
        return StepResult(loss=value, grad_norm=None, timeline=DeviceTimeline.of(self.run.report))

    def consistent(self) -> AbstractContextManager[Any]:
        """See `Stepper.consistent`. Inside, all stages have one version."""
        return self.run.consistent_parameters()

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See `Stepper.save`."""
        cyclic_checkpoint.save(self.run, self.module, save, extra)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Stepper.load`."""
        return cyclic_checkpoint.load(self.run, self.module, folder)

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


def _loss_fn(model: nn.Module) -> Any:
    """The model's own loss, which shifts the labels, as a function of logits and a batch."""
    base: Any = base_model(model)
    if getattr(base.config, "output_router_logits", False):
        raise JobError(
            "model.config.output_router_logits = true adds a loss of all layers' routers, which no single stage can "
            "compute; set it to false"
        )
    loss_function, vocab_size = base.loss_function, base.config.vocab_size

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        arguments = {key: value for key, value in batch.arguments().items() if key in ("labels", "num_items_in_batch")}
        return loss_function(logits=logits, vocab_size=vocab_size, **arguments)

    return loss


def _inputs(batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
    """The inputs of the first stage."""
    return batch.input_ids if batch.position_ids is None else (batch.input_ids, batch.position_ids)
