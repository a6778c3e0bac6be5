"""A model under shard.strategy: laconic, or one of PyTorch's own ways to train in parallel.

Every strategy gets the same initial weights, rows, optimizer and mixed precision, so that `laconic compare` compares
nothing else. The baselines are PyTorch's own calls with the settings of a careful user. On CPU this user gives FSDP2
collectives that are as good as NCCL's: [Note: The strongest baseline] in ring.py.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm.cluster import make_mesh
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, parse_block
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
        JobError: this launch has too few ranks for the strategy.
        ValueError: the engine refuses the model or the granularity.
    """
    strategy = config.shard.strategy
    on_engine = strategy in ("laconic", "zero++")
    mesh = laconic.init_mesh(device.type, islands=num_islands(config, ranks)) if on_engine else None
    if mesh is not None:
        slice_model(model, config, mesh)
        _fully_shard(model, laconic.fully_shard, _laconic_arguments(config, mesh))
    elif strategy != "ddp":
        _fully_shard(model, fully_shard, _fsdp2_arguments(config, ranks, device))
        if device.type == "cpu" and strategy != "fsdp2-gloo":
            use_rings([model, *layers_to_shard(model)])
    materialize(model, config.model, device)
    if config.train.compile:
        compile_layers(model)
    if strategy != "ddp":
        return model, mesh
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,
        **{_BUFFER_SYNC: False},  # type: ignore[arg-type]  # the buffers of a model do not change in training
    )
    return wrapped, None


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


def _fsdp2_arguments(config: Config, ranks: RankInfo, device: torch.device) -> dict[str, Any]:
    arguments = _common_arguments(config)
    if config.shard.strategy == "fsdp2-gloo" and device.type != "cpu":
        raise JobError(
            f"shard.strategy = 'fsdp2-gloo' keeps Gloo's own collectives, which are for CPU; use 'fsdp2' on "
            f"{device.type}"
        )
    if config.shard.strategy == "torchft-diloco":
        islands = num_islands(config, ranks)
        mesh = make_mesh(device.type, (islands, ranks.world_size // islands), ("island", "shard"))
        return {**arguments, "mesh": mesh["shard"]}
    if config.shard.strategy == "hsdp":
        shape = (ranks.num_nodes, ranks.num_local)
        return {**arguments, "mesh": make_mesh(device.type, shape, ("replicate", "shard"))}
    arguments["mesh"] = make_mesh(device.type, (dist.get_world_size(),), ("shard",))
    if config.shard.strategy == "fsdp2-hpz":
        if ranks.num_local < 2:
            raise JobError(
                "shard.strategy = 'fsdp2-hpz' keeps parameters on the ranks of one node, so it needs at least 2 ranks "
                f"per node, got {ranks.num_local}; use 'fsdp2' or more ranks per node"
            )
        arguments["reshard_after_forward"] = ranks.num_local
    return arguments
