"""The stepper of a job under DeepSpeed's ZeRO-3."""

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic.checkpoint
from laconic.comm.cluster import make_mesh
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config import Config
from laconic.contestants.deepspeed_setup import (
    Sizes,
    freeing_weights,
    import_deepspeed,
    start_communication,
    zero_3,
)
from laconic.contestants.deepspeed_state import Partitions, local_part
from laconic.data.batches import Batch
from laconic.hf.models import materialize
from laconic.shard.policies import Precision
from laconic.strategies.memory import local_nbytes, state_nbytes
from laconic.strategies.optimizers import make_optimizer
from laconic.strategies.stepper import NotFiniteError, Save, Stepper, StepResult


class DeepSpeedStepper(Stepper):
    """A `Stepper` under DeepSpeed's own engine: [Note: DeepSpeed as a baseline] in deepspeed_setup.py.

    Each rank makes the whole model at the start, as `deepspeed.initialize` does with a model that is given to it.
    """

    def __init__(self, model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> None:
        """Partition `model`, which is on the meta device. Collective.

        Raises:
            JobError: DeepSpeed is not installed.
        """
        deepspeed = import_deepspeed(device)
        start_communication(deepspeed, device)
        self.module = model
        self.num_workers, self.workers = ranks.world_size, range(ranks.rank, ranks.rank + 1)
        self.peers = range(ranks.world_size)
        materialize(model, config.model, device)
        settings = zero_3(config, ranks, Sizes.of(model))
        parts = {id(p): local_part(p, ranks.rank, ranks.world_size) for p in model.parameters() if p.requires_grad}
        self.optimizer = make_optimizer(model, config.optimizer)
        groups = [{"params": list(group["params"])} for group in self.optimizer.param_groups]
        with _kept_buffers(model):  # DeepSpeed would round them, too
            _round(model, config.shard.policy.precision)
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        self._zero = self._engine.optimizer
        self._partitions = Partitions(model, self._zero, groups, make_mesh(device.type, (ranks.world_size,)))
        self._partitions.set_masters(parts)
        self._measure_norm, self._zero._get_norm_groups = self._zero._get_norm_groups, self._checked_norms
        self._mean_loss = math.nan

    def step(self, batches: Sequence[Batch], *, is_last: bool) -> StepResult:
        """See `Stepper.step`. DeepSpeed divides the loss by the number of micro-batches."""
        losses = []
        with freeing_weights():
            for index, batch in enumerate(batches):
                loss = self._engine(**batch.arguments(), use_cache=False).loss
                self._engine.backward(loss)
                losses.append(loss.detach() / len(batches))
                if index == len(batches) - 1:
                    self._mean_loss = float(sum(losses))
                self._engine.step()  # the optimizer's step after the last micro-batch
        return StepResult(loss=self._mean_loss, grad_norm=float(self._engine.get_global_grad_norm()))

    def _checked_norms(self) -> list[Tensor]:
        """The gradient norm of each group, which DeepSpeed asks for before it changes weights.

        Raises:
            NotFiniteError: a norm, which DeepSpeed then calls -1, or the loss is not finite.
        """
        norms: list[Tensor] = self._measure_norm()
        is_on_all_ranks = any(float(norm) < 0 or not math.isfinite(norm) for norm in norms)
        if is_on_all_ranks or not math.isfinite(self._mean_loss):
            raise NotFiniteError(
                loss=self._mean_loss,
                grad_norm=math.nan,
                is_on_all_ranks=is_on_all_ranks,
                weights="as after step {step}",
            )
        return norms

    def consistent(self) -> AbstractContextManager[Any]:
        """See `Stepper.consistent`."""
        return contextlib.nullcontext()

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See `Stepper.save`. The checkpoint has the same tensors as under any other strategy."""
        with self._resting(), self._partitions.shown() as optimizer:
            save(model=self.module, optimizer=optimizer, local_steps=None, extra=extra)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Stepper.load`."""
        with self._resting(), self._partitions.shown() as optimizer:
            return laconic.checkpoint.load_checkpoint(folder, model=self.module, optimizer=optimizer)

    @contextlib.contextmanager
    def _resting(self) -> Any:
        """Free gathered parameters: after an evaluation some may be gathered ahead."""
        self._zero._partition_all_parameters()
        yield

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See `Stepper.traffic`."""
        return None

    def resting_bytes(self) -> int:
        """See `Stepper.resting_bytes`. DeepSpeed keeps the buffers for gradients between steps, too."""
        zero = self._zero
        tensors = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (
                *(parameter.ds_tensor for parameter in self.module.parameters()),
                *zero.fp32_partitioned_groups_flat,
                zero.grad_partitions_flat_buffer,
                *(bucket.buffer for bucket in zero.ipg_buckets.values()),
            )
        }
        secondary = [getattr(parameter, "ds_secondary_tensor", None) for parameter in self.module.parameters()]
        copies = local_nbytes(tensor for tensor in secondary if tensor is not None)
        return sum(tensors.values()) + copies + state_nbytes(zero.optimizer)

    def close(self) -> None:
        """See `Stepper.close`."""
        dist.barrier()
        self._engine.destroy()


@torch.no_grad()
def _round(model: nn.Module, precision: Precision) -> None:
    """Give parameters the dtype in which they are gathered; `Partitions` has the trainable ones in float32."""
    if precision.param_dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Any:
    """Give the model its buffers back at the end of the block."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    yield
    for module, own in buffers:
        module._buffers.update(own)
