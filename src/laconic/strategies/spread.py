"""One model, spread in the way the job asks for: laconic, or a PyTorch baseline.

Every strategy gets the same initial weights, rows, optimizer and mixed precision, and is asked the same few questions,
so that `laconic compare` compares nothing else. The baselines are PyTorch's own calls with the settings a careful user
would pick, not strawmen.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config.job import Config, JobError, block
from laconic.hf.models import layers_to_shard, materialize
from laconic.strategies.sync import num_islands, slice_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# 2.13 renamed it and made the old name warn.
_BUFFER_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank as the engine accounts them: parameters, gradients and buffers, without activations."""

    device_bytes: int = 0
    """Now."""
    device_peak_bytes: int = 0
    """The most since the last reset."""
    host_bytes: int = 0
    """Cached slices in host memory."""


class Spread:
    """A model under a strategy, materialised and ready to train."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        """What checkpoints and optimizers see."""
        self.mesh: DeviceMesh | None = None
        """Of islands, nodes and local ranks, if the strategy knows islands."""

    @property
    def forward_module(self) -> nn.Module:
        """What is called."""
        return self.module

    def set_sync(self, sync: bool) -> None:
        """Whether the next backward is the last of its step and must leave reduced gradients."""
        self.module.set_requires_gradient_sync(sync)  # type: ignore[operator]  # FSDP2's name, and laconic's

    def traffic(self) -> Snapshot | None:
        """Bytes so far, where the strategy counts them."""
        return None

    def memory(self) -> Memory | None:
        """Bytes held, where the strategy accounts for them."""
        return None

    def reset_peak_memory(self) -> None:
        """Start a new peak."""


class _Laconic(Spread):
    module: Any

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.mesh = mesh

    def traffic(self) -> Snapshot | None:
        return self.module.traffic.snapshot()

    def memory(self) -> Memory | None:
        report = self.module.memory()
        return Memory(
            device_bytes=report.device_bytes,
            device_peak_bytes=report.device_peak_bytes,
            host_bytes=report.host_bytes,
        )

    def reset_peak_memory(self) -> None:
        self.module.reset_peak_memory()


class _Ddp(Spread):
    def __init__(self, module: nn.Module, wrapped: DistributedDataParallel) -> None:
        super().__init__(module)
        self._wrapped = wrapped

    @property
    def forward_module(self) -> nn.Module:
        return self._wrapped

    def set_sync(self, sync: bool) -> None:
        self._wrapped.require_backward_grad_sync = sync  # what DDP.no_sync() sets


def spread(model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> Spread:
    """Apply config.shard to `model` (on the meta device) and fill in its weights. Collective."""
    shard = config.shard
    if shard.strategy == "ddp":
        materialize(model, config.model, device)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **{_BUFFER_SYNC: False},  # type: ignore[arg-type]  # the buffers of a model do not change in training
        )
        return _Ddp(model, wrapped)
    if shard.strategy == "laconic":
        import laconic

        mesh = laconic.init_mesh(device.type, islands=num_islands(config, ranks))
        slice_model(model, config.sync, mesh)
        cache = laconic.Cache(where=shard.cache, device_budget_bytes=shard.device_budget_bytes)
        for module in [*layers_to_shard(model), model]:
            laconic.fully_shard(
                module,
                mesh=mesh,
                cache=cache,
                mp_policy=mixed_precision(config),
                reshard_after_forward=_reshard_after_forward(config),
                granularity=granularity(config),
            )
        materialize(model, config.model, device)
        return _Laconic(model, mesh)
    for module in [*layers_to_shard(model), model]:
        fully_shard(module, **_fsdp2_arguments(config, ranks, device))
    materialize(model, config.model, device)
    return Spread(model)


def granularity(config: Config) -> Any:
    """What `fully_shard` gets: the job's blocks, or those that its optimizer asks for."""
    from laconic.layout.granularity import Block
    from laconic.optim import AdamW8bit

    given = config.shard.granularity
    if given is None:
        return AdamW8bit.granularity if config.optimizer.name == "adamw8bit" else None
    if isinstance(given, str):
        return Block(**block(given))
    return {pattern: Block(**block(text)) for pattern, text in given.items()}


def mixed_precision(config: Config) -> MixedPrecisionPolicy:
    """The policy with nothing left to a default: what `None` reduces in depends on the release of torch."""
    held = DTYPES[config.model.dtype]
    param_dtype = DTYPES[config.shard.param_dtype] if config.shard.param_dtype else None
    reduce_dtype = DTYPES[config.shard.reduce_dtype] if config.shard.reduce_dtype else param_dtype or held
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def _reshard_after_forward(config: Config) -> bool:
    """The root too, unless the user says otherwise: the memory of ZeRO-3, and equal terms for all."""
    given = config.shard.reshard_after_forward
    return True if given is None else given


def _fsdp2_arguments(config: Config, ranks: RankInfo, device: torch.device) -> dict[str, Any]:
    reshard: bool | int = _reshard_after_forward(config)
    if config.shard.strategy == "hsdp":
        shape = (ranks.num_nodes, ranks.num_local)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if config.shard.strategy == "fsdp2-hpz":
        if ranks.num_local < 2:
            raise JobError(
                "shard.strategy = 'fsdp2-hpz' keeps a slice on the ranks of one node, so it needs at least 2 ranks per "
                f"node, got {ranks.num_local}; use 'fsdp2' or more ranks per node"
            )
        reshard = ranks.num_local
    return {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": mixed_precision(config)}
