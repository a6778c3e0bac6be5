"""A model under shard.strategy: laconic, or one of PyTorch's own ways to train in parallel.

Every strategy gets the same initial weights, rows, optimizer and mixed precision, so that `laconic compare` compares
nothing else. The baselines are PyTorch's own calls with the settings of a careful user. On CPU this user gives FSDP2
collectives that are as good as NCCL's: [Note: The strongest baseline] in ring.py.

[Note: DDP's settings]
DDP's buckets have 25 MB, its default. In the job of benchmarks/jobs/wire.toml on 2 x 2 ranks buckets of 1, 4 or 100 MB
were not more than 2 % faster at 200 Mbit/s, and no faster on an unshaped wire. `static_graph` is not set. It saves the
search for parameters without a gradient, which is off anyway, and was no faster. And it ends in an internal error of
torch 2.13 where the first backward does not reduce, as with several micro-batches.
"""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import registry
from laconic.comm.cluster import make_mesh
from laconic.config import ModelConfig, OptimizerConfig, ShardConfig
from laconic.hf.layers import layers_to_shard
from laconic.models.build import materialize
from laconic.optim import AdamW8bit
from laconic.policy import with_keys
from laconic.shard.policies import ShardPolicy
from laconic.strategies.islands import num_islands, slice_model
from laconic.strategies.optimizers import tiling
from laconic.strategies.ring import use_rings
from laconic.strategies.stepper import Setup

# torch 2.13 has a new name for this argument, and warns if the old name is used.
_BUFFER_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def parallelize(model: nn.Module, setup: Setup) -> tuple[nn.Module, DeviceMesh | None]:
    """Apply the job's strategy to `model`, which is on the meta device, and fill in its weights. Collective.

    Return the module to call in forward, and the mesh of islands, nodes and local ranks (None for the baselines).

    Raises:
        ValueError: the engine refuses the model or the granularity.
    """
    return registry.load(registry.named(setup.shard.strategy).parallelize)(model, setup)


def on_engine(model: nn.Module, setup: Setup) -> tuple[nn.Module, DeviceMesh | None]:
    """The engine: see `parallelize`."""
    mesh = laconic.init_mesh(setup.device.type, islands=num_islands(setup.sync, setup.ranks))
    slice_model(model, setup.sync, Path(setup.train.output), mesh)
    policies = shard_policy(setup.shard, setup.optimizer).arguments()
    precision = mixed_precision(setup.shard, setup.model)
    _fully_shard(model, laconic.fully_shard, {**policies, "mesh": mesh, "mp_policy": precision})
    _fill(model, setup)
    return model, mesh


def fsdp2(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """FSDP2 over all ranks: see `parallelize`."""
    return shard_by_fsdp2(model, setup, _flat_mesh(setup))


def fsdp2_on_gloo(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """The same with the collectives that Gloo gives it: see `parallelize`."""
    return shard_by_fsdp2(model, setup, _flat_mesh(setup), with_rings=False)


def fsdp2_hpz(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """FSDP2 that keeps parameters on the ranks of a node after forward: see `parallelize`."""
    return shard_by_fsdp2(model, setup, _flat_mesh(setup), reshard_after_forward=setup.ranks.num_local)


def hsdp(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """FSDP2 inside each node, and replicas between nodes: see `parallelize`."""
    shape = setup.ranks.num_nodes, setup.ranks.num_local
    mesh = make_mesh(setup.device.type, shape, ("replicate", "shard"))
    keeps_sums = registry.named(setup.shard.strategy).reduces_always  # inside the node, for the last micro-batch
    is_divided = mixed_precision(setup.shard, setup.model).reduce_dtype is torch.float16
    if setup.device.type != "cpu" or keeps_sums or is_divided:
        return shard_by_fsdp2(model, setup, mesh)
    return shard_by_fsdp2(model, setup, mesh["shard"], replicas=mesh["replicate"].get_group())


def ddp(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """DDP: see `parallelize` and [Note: DDP's settings]."""
    _fill(model, setup)
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if setup.device.type == "cpu" else [setup.device],
        gradient_as_bucket_view=True,
        **{_BUFFER_SYNC: False},  # type: ignore[arg-type]  # the buffers of a model do not change in training
    )
    return wrapped, None


def _flat_mesh(setup: Setup) -> DeviceMesh:
    return make_mesh(setup.device.type, (setup.ranks.world_size,), ("shard",))


def shard_by_fsdp2(
    model: nn.Module,
    setup: Setup,
    mesh: DeviceMesh,
    *,
    with_rings: bool = True,
    replicas: ProcessGroup | None = None,
    **arguments: Any,
) -> tuple[nn.Module, None]:
    """Apply torch's `fully_shard` over `mesh`, with other `arguments` than the job's, and fill in the weights.

    `replicas` are for `use_rings`.
    """
    reshards = setup.shard.policy.reshard_after_forward is not False  # the root too, as in ZeRO-3
    common = {"mp_policy": mixed_precision(setup.shard, setup.model), "reshard_after_forward": reshards}
    _fully_shard(model, fully_shard, {**common, "mesh": mesh, **arguments})
    if setup.device.type == "cpu" and with_rings:
        use_rings([model, *layers_to_shard(model)], replicas)
    _fill(model, setup)
    return model, None


def _fill(model: nn.Module, setup: Setup) -> None:
    materialize(model, setup.model, setup.device)
    if setup.train.compile:
        compile_layers(model)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each layer in place. Gathers and reductions stay outside: hooks of a sharded layer are not compiled."""
    for layer in layers_to_shard(model):
        layer.compile(backend=backend)


def shard_policy(shard: ShardConfig, optimizer: OptimizerConfig) -> ShardPolicy:
    """The policy of a job, as its strategy and its optimizer need it."""
    policy = shard.policy
    if policy.granularity is None and optimizer.name == "adamw8bit":
        policy = replace(policy, granularity=partial(AdamW8bit.granularity, block=tiling(optimizer)))
    policy = with_keys(policy, **registry.named(shard.strategy).policy)
    return replace(policy, wire=policy.wire.for_optimizer(optimizer.name))


def mixed_precision(shard: ShardConfig, model: ModelConfig) -> MixedPrecisionPolicy:
    """The policy of the job. It always sets `reduce_dtype`, whose default depends on the release of torch."""
    return shard.policy.precision.mp_policy(model_dtype=getattr(torch, model.dtype))


def _fully_shard(model: nn.Module, shard: Any, arguments: dict[str, Any]) -> None:
    for module in [*layers_to_shard(model), model]:
        shard(module, **arguments)
