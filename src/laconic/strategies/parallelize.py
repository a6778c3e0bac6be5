"""A model under shard.strategy: laconic, or one of PyTorch's own ways to train in parallel.

Every strategy gets the same initial weights, rows, optimizer and mixed precision, so that `laconic compare` compares
nothing else. The baselines are PyTorch's own calls with the settings of a careful user. On CPU this user gives FSDP2
collectives that are as good as NCCL's: [Note: The strongest baseline] in ring.py.
"""

import inspect
from dataclasses import replace
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
from laconic.config import Config, parse_block
from laconic.hf.layers import layers_to_shard
from laconic.hf.models import materialize
from laconic.optim import AdamW8bit
from laconic.shard.policies import ZERO_PLUS_PLUS
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
    mesh = laconic.init_mesh(device.type, islands=num_islands(config, ranks))
    slice_model(model, config, mesh)
    _fully_shard(model, laconic.fully_shard, _laconic_arguments(config, mesh))
    _fill(model, config, device)
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
    _fill(model, config, device)
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
    _fully_shard(model, fully_shard, {**_common_arguments(config), "mesh": mesh, **arguments})
    if device.type == "cpu" and with_rings:
        use_rings([model, *layers_to_shard(model)])
    _fill(model, config, device)
    return model, None


def _fill(model: nn.Module, config: Config, device: torch.device) -> None:
    materialize(model, config.model, device)
    if config.train.compile:
        compile_layers(model)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each layer in place. Gathers and reductions stay outside: hooks of a sharded layer are not compiled."""
    for layer in layers_to_shard(model):
        layer.compile(backend=backend)


def granularity(config: Config) -> Any:
    """The `granularity` of `fully_shard`: the job's blocks, or else the blocks that its optimizer needs."""
    given = config.shard.granularity
    if given is None:
        return AdamW8bit.granularity if config.optimizer.name == "adamw8bit" else None
    if isinstance(given, str):
        return parse_block(given)
    return {pattern: parse_block(text) for pattern, text in given.items()}


def mixed_precision(config: Config) -> MixedPrecisionPolicy:
    """The policy of the job. It always sets `reduce_dtype`, whose default depends on the release of torch."""
    shard = config.shard
    reduce_dtype = shard.reduce_dtype or shard.param_dtype or config.model.dtype
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, shard.param_dtype) if shard.param_dtype else None,
        reduce_dtype=getattr(torch, reduce_dtype),
    )


def _fully_shard(model: nn.Module, shard: Any, arguments: dict[str, Any]) -> None:
    for module in [*layers_to_shard(model), model]:
        shard(module, **arguments)


def _common_arguments(config: Config) -> dict[str, Any]:
    """The arguments of both `fully_shard`. Unless the job says otherwise, the root reshards too, as in ZeRO-3."""
    reshard = config.shard.reshard_after_forward
    return {"mp_policy": mixed_precision(config), "reshard_after_forward": True if reshard is None else reshard}


def _laconic_arguments(config: Config, mesh: DeviceMesh) -> dict[str, Any]:
    arguments = {
        **_common_arguments(config),
        "mesh": mesh,
        "granularity": granularity(config),
        "wire": wire_policy(config),
        "checks": laconic.Checks(interval=config.shard.check_every, on_damage=config.shard.on_damage),
    }
    if config.shard.strategy == "zero++":
        return {**arguments, "cache": "device"}
    cache = laconic.Cache(where=config.shard.cache, device_budget_bytes=config.shard.device_budget_bytes)
    return {**arguments, "cache": cache}


def wire_policy(config: Config) -> laconic.Wire:
    """The policy of crossings between nodes.

    Muon and Shampoo enlarge small directions of a gradient, and what a codec has lost with them. So for them the word
    "4bit" sends gradients in eight bits; a table in `shard.wire` is followed as it is.
    """
    if config.shard.strategy == "zero++":
        return ZERO_PLUS_PLUS
    policy = config.shard.wire_policy
    if config.shard.wire == "4bit" and config.optimizer.name in ("muon", "shampoo"):
        return replace(policy, gradients="int8")
    return policy
