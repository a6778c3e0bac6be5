"""DeepSpeed's ZeRO-3 as a careful user sets it up, and the stepper of a job under it.

[Note: ZeRO-3's partitions]
DeepSpeed cuts every parameter, flattened, into as many equal parts as there are ranks, the last of them padded: rank r
of W has the elements from r * C on, C = ceil(numel / W). Trainable parts lie one behind the other in one float32 buffer
for each group of the optimizer.

[Note: DeepSpeed as a baseline]
DeepSpeed's defaults are for models of billions of parameters. With `stage3_max_reuse_distance` at its default of 1e9
elements, a smaller model stays gathered from forward to backward on every rank: that is not ZeRO-3. So the sizes here
follow the model, as FSDP2's do, which gathers, reduces and frees a layer at a time and keeps the root's own parameters:

- `reduce_bucket_size` and `stage3_prefetch_bucket_size` are the elements of the largest layer.
- `stage3_max_live_parameters` is the root's own parameters and two layers, which is the most that FSDP2 holds.
- `stage3_max_reuse_distance` is 0, so every weight crosses once in forward and once in backward, as in FSDP2 with
  `reshard_after_forward=True`. With shard.reshard_after_forward = false it is the whole model.
- `stage3_param_persistence_threshold` is 0. Parameters up to the threshold stay whole on every rank, and are gathered
  once after each optimizer step. The default of 100,000 elements is a small share of a large model. Of a small one it
  is most of the matrices.

On Gloo a gather is a ring and runs ahead, as for FSDP2. Reductions go along laconic's true ring: [Note: The strongest
baseline] in strategies/ring.py. `overlap_comm` needs streams, which a CPU has not, so a reduction ends before backward
goes on. ZeRO-3 reduces the gradients of every micro-batch, so with accumulation more bytes cross than under FSDP2.
"""

import contextlib
import importlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import _compat
from laconic.config import JobError
from laconic.data.batches import Batch
from laconic.extras import how_to_install
from laconic.hf.layers import layers_to_shard
from laconic.models.build import materialize
from laconic.shard.policies import Precision
from laconic.strategies.memory import local_nbytes, state_nbytes
from laconic.strategies.optimizers import make_optimizer
from laconic.strategies.ring import RingReduceScatter
from laconic.strategies.stepper import NotFiniteError, Setup, Stepper, StepResult

_NO_CUDA = "DS_ACCELERATOR=cpu DS_BUILD_OPS=0"


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for `device`, quietly.

    Raises:
        JobError: it is not installed, or is not the release whose names this code uses.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # ZeRO-3's hpZ takes the number of ranks on a node from this variable on a CPU.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise JobError(
            f"shard.strategy = 'deepspeed' needs DeepSpeed ({error}); on a machine without CUDA: "
            f"{how_to_install('deepspeed', environment=_NO_CUDA, of_contestants=True)}"
        ) from error
    if not deepspeed.__version__.startswith("0.19."):
        raise JobError(
            f"shard.strategy = 'deepspeed' is written for DeepSpeed 0.19, and {deepspeed.__version__} is installed; "
            f"{how_to_install('deepspeed', of_contestants=True)}"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # Or DeepSpeed compiles a C++ extension at every start, for all-reduces of inference.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_communication(deepspeed: ModuleType, device: torch.device) -> None:
    """Let DeepSpeed use the process group that exists, with a true ring reduce-scatter on a CPU. Collective."""
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    backend = deepspeed.comm.comm.cdb
    backend.all_gather_function = _all_gather
    if device.type == "cpu":
        backend.reduce_scatter_function = _reduce_scatter


def _all_gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The gather by its name in this release of torch, which warns of the older one."""
    group = dist.group.WORLD if group is None else group
    return _compat.all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)


def _reduce_scatter(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """`torch.distributed.reduce_scatter_tensor` along a ring, for an `output` that is this rank's part of `input`."""
    group = dist.group.WORLD if group is None else group
    landing = torch.empty_like(output)
    RingReduceScatter()(landing, input, group, op)
    output.copy_(landing)


@contextlib.contextmanager
def freeing_weights() -> Iterator[None]:
    """Use DeepSpeed's linear function in the block, whose graph does not hold gathered weights until backward.

    `with deepspeed.zero.Init():` around a model's construction sets it for ever (its `memory_efficient_linear`).
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    torchs = nn.functional.linear
    nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        nn.functional.linear = torchs


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of ZeRO-3's buffers, in elements: [Note: DeepSpeed as a baseline]."""

    layer: int
    """The largest layer."""
    root: int
    """All parameters outside layers."""
    model: int

    @staticmethod
    def of(model: nn.Module) -> "Sizes":
        """The sizes for a model that is not sharded yet; tied parameters count once."""
        layers = layers_to_shard(model)
        numels = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        total = sum(parameter.numel() for parameter in model.parameters())
        return Sizes(layer=max(numels, default=total), root=max(0, total - sum(numels)), model=total)


def zero_3(setup: Setup, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's configuration for a job: [Note: DeepSpeed as a baseline]."""
    policy, strategy = setup.shard.policy, setup.shard.strategy
    reshards = policy.reshard_after_forward is not False
    compute = policy.precision.param_dtype or setup.model.dtype
    reduce = policy.precision.reduce_dtype or compute
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": sizes.layer,
        "stage3_prefetch_bucket_size": sizes.layer,
        "stage3_max_live_parameters": sizes.root + 2 * sizes.layer if reshards else sizes.model,
        "stage3_max_reuse_distance": 0 if reshards else sizes.model,
        "stage3_param_persistence_threshold": 0,
    }
    if strategy != "deepspeed":
        zero["zero_hpz_partition_size"] = setup.ranks.num_local
    if strategy == "deepspeed-zero++":
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return {
        "train_micro_batch_size_per_gpu": setup.train.micro_batch_size,
        "gradient_accumulation_steps": setup.train.accumulation,
        "gradient_clipping": setup.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": compute == "bfloat16"},
        "communication_data_type": {"float32": "fp32", "bfloat16": "bf16"}[reduce],
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


@torch.no_grad()
def set_masters(zero: Any, parts: dict[int, Tensor]) -> None:
    """Copy this rank's part of each trainable parameter, by the parameter's id, to where DeepSpeed keeps it.

    `zero` is DeepSpeed's optimizer of stage 3. It has the parts in float32, and in the dtype that it gathers.
    """
    for parameters, buffer in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in parameters:
            part = parts[id(parameter)]
            buffer.detach()[start : start + part.numel()].copy_(part)
            start += parameter.ds_tensor.ds_numel
    for low, high in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
        low.data.copy_(high.data)  # as its optimizer's step does


def own_part(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A copy of the elements of `whole`, flattened, that DeepSpeed leaves on `rank`: [Note: ZeRO-3's partitions]."""
    size = -(-whole.numel() // num_ranks)
    return whole.detach().reshape(-1)[rank * size : (rank + 1) * size].clone()


class DeepSpeedStepper(Stepper):
    """A `Stepper` under DeepSpeed's own engine: [Note: DeepSpeed as a baseline] in deepspeed.py.

    Each rank makes the whole model at the start, as `deepspeed.initialize` does with a model that is given to it.
    """

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        """Partition `model`, which is on the meta device. Collective.

        Raises:
            JobError: DeepSpeed is not installed.
        """
        ranks, device = setup.ranks, setup.device
        deepspeed = import_deepspeed(device)
        start_communication(deepspeed, device)
        self.module = model
        self.num_workers, self.workers = ranks.world_size, range(ranks.rank, ranks.rank + 1)
        self.peers = range(ranks.world_size)
        materialize(model, setup.model, device)
        settings = zero_3(setup, Sizes.of(model))
        parts = {id(p): own_part(p, ranks.rank, ranks.world_size) for p in model.parameters() if p.requires_grad}
        self.optimizer = make_optimizer(model, setup.optimizer)
        with _kept_buffers(model):  # DeepSpeed would round them, too
            _round(model, setup.shard.policy.precision)
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        self._zero = self._engine.optimizer
        set_masters(self._zero, parts)
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
    """Give parameters the dtype in which they are gathered; `set_masters` has the trainable ones in float32."""
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
