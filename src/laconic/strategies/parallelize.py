"""A model under shard.strategy: laconic, or one of PyTorch's own ways to train in parallel.

Every strategy gets the same initial weights, rows, optimizer and mixed precision, so that `laconic compare` compares
nothing else. The baselines are PyTorch's own calls with the settings of a careful user. On CPU this user gives FSDP2
collectives that are as good as NCCL's: [Note: The strongest baseline] in ring.py.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import registry
from laconic.comm.cluster import make_mesh
from laconic.comm.launch import RankInfo
from laconic.config import Config, ModelConfig, OptimizerConfig, ShardConfig
from laconic.hf.layers import layers_to_shard
from laconic.hf.models import materialize
from laconic.optim import AdamW8bit
from laconic.shard.policies import ZERO_PLUS_PLUS, Cache, ShardPolicy
from laconic.strategies.islands import num_islands, slice_model
from laconic.strategies.ring import use_rings

# torch 2.13 has a new name for this argument, and warns if the old name is used.
_BUFFER_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def parallelize(
    model: nn.Module, config: Config, ranks: RankInfo, device: torch.device
) -> tuple[nn.Module, DeviceMesh | None]:
    """Apply config.shard to `model`, which is on the meta device, and fill in its weights. Collective.

    Return the module to call in forward, and the mesh of islands, nodes and local ranks (None for the baselines).

    Raises:
        ValueError: the engine refuses the model or the granularity.
    """
    return registry.load(registry.named(config.shard.strategy).parallelize)(model, config, ranks, device)


def on_engine(
    model: nn.Module, config: Config, ranks: RankInfo, device: torch.device
) -> tuple[nn.Module, DeviceMesh | None]:
    """The engine: see `parallelize`."""
    mesh = laconic.init_mesh(device.type, islands=num_islands(config.sync, ranks))
    slice_model(model, config.sync, Path(config.train.output), mesh)
    policies = shard_policy(config.shard, config.optimizer).arguments()
    precision = mixed_precision(config.shard, config.model)
    _fully_shard(model, laconic.fully_shard, {**policies, "mesh": mesh, "mp_policy": precision})
    _fill(model, config.model, device, compiles=config.train.compile)
    return model, mesh


def fsdp2(model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> tuple[nn.Module, None]:
    """FSDP2 over all ranks: see `parallelize`."""
    return shard_by_fsdp2(model, config, device, make_mesh(device.type, (ranks.world_size,), ("shard",)))


def fsdp2_on_gloo(model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> tuple[nn.Module, None]:
    """The same with the collectives that Gloo gives it: see `parallelize`."""
    mesh = make_mesh(device.type, (ranks.world_size,), ("shard",))
    return shard_by_fsdp2(model, config, device, mesh, with_rings=False)


def fsdp2_hpz(model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> tuple[nn.Module, None]:
    """FSDP2 that keeps parameters on the ranks of a node after forward: see `parallelize`."""
    mesh = make_mesh(device.type, (ranks.world_size,), ("shard",))
    return shard_by_fsdp2(model, config, device, mesh, reshard_after_forward=ranks.num_local)


def hsdp(model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> tuple[nn.Module, None]:
    """FSDP2 inside each node, and replicas between nodes: see `parallelize`."""
    mesh = make_mesh(device.type, (ranks.num_nodes, ranks.num_local), ("replicate", "shard"))
    return shard_by_fsdp2(model, config, device, mesh)


def ddp(model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> tuple[nn.Module, None]:
    """DDP: see `parallelize`."""
    _fill(model, config.model, device, compiles=config.train.compile)
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,
        **{_BUFFER_SYNC: False},  # type: ignore[arg-type]  # the buffers of a model do not change in training
    )
    return wrapped, None


def shard_by_fsdp2(
    model: nn.Module,
    config: Config,
    device: torch.device,
    mesh: DeviceMesh,
    *,
    with_rings: bool = True,
    **arguments: Any,
) -> tuple[nn.Module, None]:
    """Apply torch's `fully_shard` over `mesh`, with other `arguments` than the job's, and fill in the weights."""
    reshards = config.shard.policy.reshard_after_forward is not False  # the root too, as in ZeRO-3
    common = {"mp_policy": mixed_precision(config.shard, config.model), "reshard_after_forward": reshards}
    _fully_shard(model, fully_shard, {**common, "mesh": mesh, **arguments})
    if device.type == "cpu" and with_rings:
        use_rings([model, *layers_to_shard(model)])
    _fill(model, config.model, device, compiles=config.train.compile)
    return model, None


def _fill(model: nn.Module, section: ModelConfig, device: torch.device, *, compiles: bool) -> None:
    materialize(model, section, device)
    if compiles:
        compile_layers(model)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each layer in place. Gathers and reductions stay outside: hooks of a sharded layer are not compiled."""
    for layer in layers_to_shard(model):
        layer.compile(backend=backend)


def shard_policy(shard: ShardConfig, optimizer: OptimizerConfig) -> ShardPolicy:
    """The policy of a job, as its strategy and its optimizer need it."""
    policy = shard.policy
    if policy.granularity is None and optimizer.name == "adamw8bit":
        policy = replace(policy, granularity=AdamW8bit.granularity)
    if shard.strategy == "zero++":
        return replace(policy, wire=ZERO_PLUS_PLUS, cache=Cache(where="device"))
    return replace(policy, wire=policy.wire.for_optimizer(optimizer.name))


def mixed_precision(shard: ShardConfig, model: ModelConfig) -> MixedPrecisionPolicy:
    """The policy of the job. It always sets `reduce_dtype`, whose default depends on the release of torch."""
    return shard.policy.precision.mp_policy(model_dtype=getattr(torch, model.dtype))


def _fully_shard(model: nn.Module, shard: Any, arguments: dict[str, Any]) -> None:
    for module in [*layers_to_shard(model), model]:
        shard(module, **arguments)
