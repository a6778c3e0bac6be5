"""DeepSpeed's ZeRO-3 as a careful user sets it up: its configuration and its communication.

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
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import _compat
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError
from laconic.extras import how_to_install
from laconic.hf.layers import layers_to_shard
from laconic.strategies.ring import RingReduceScatter

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


def zero_3(config: Config, ranks: RankInfo, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's configuration for a job: [Note: DeepSpeed as a baseline]."""
    policy, strategy = config.shard.policy, config.shard.strategy
    reshards = policy.reshard_after_forward is not False
    compute = policy.precision.param_dtype or config.model.dtype
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
        zero["zero_hpz_partition_size"] = ranks.num_local
    if strategy == "deepspeed-zero++":
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": config.train.accumulation,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": compute == "bfloat16"},
        "communication_data_type": {"float32": "fp32", "bfloat16": "bf16"}[reduce],
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
