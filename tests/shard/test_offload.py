"""FSDP2's CPUOffloadPolicy and shard_placement_fn, and casts after fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks


@pytest.mark.parametrize(("world", "cache"), [(3, "none"), (2, "host")])
@on_ranks("world", local=1)
def test_offloaded_shards_take_no_device_memory(cache: str) -> None:
    """Shards and gradients are counted in host memory; the numbers are those of a model without offloading."""
    models: list[Any] = [
        sharded_net.shard(sharded_net.build(), cache=cache, offload_policy=policy)
        for policy in (None, CPUOffloadPolicy())
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for seed in range(2):
        losses = [sharded_net.train_step(*pair, seed=seed) for pair in zip(models, optimizers, strict=True)]
        assert torch.equal(*losses)
    for parameter, offloaded in zip(*(model.parameters() for model in models), strict=True):
        assert offloaded.device.type == "cpu"
        assert torch.equal(parameter.to_local(), offloaded.to_local())
    memory, offloaded = (model.memory() for model in models)
    shards = sum(bucket.shard.nbytes for bucket in sharded_net.buckets(models[0]))
    assert memory.device_bytes == shards
    assert offloaded.device_bytes == 0
    assert offloaded.host_bytes == memory.host_bytes + shards
    assert offloaded.device_peak_bytes <= memory.device_peak_bytes - shards


@on_ranks(4, local=1)
def test_parameters_of_one_unit_may_lie_on_two_meshes() -> None:
    """Parameters of one unit on two meshes: the weight of a layer on all ranks, its bias on pairs of ranks."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    class Result:
        def __init__(self, mesh: Any) -> None:
            self.placement, self.mesh_info = Shard(0), self
            self.mesh = mesh

    def place(parameter: nn.Parameter) -> Any:
        return Result(whole["inner"]) if parameter.ndim == 1 else Shard(0)

    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    laconic.fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=place)
    assert [bucket.cluster.size for bucket in sharded_net.buckets(model)] == [4, 2]
    rank = dist.get_rank()
    model(torch.full((1, 5), rank + 1.0)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((7, 5), 2.5))  # type: ignore[union-attr]
    assert torch.equal(model.bias.grad.full_tensor(), torch.ones(7))  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="laconic cuts it at block borders"):
        laconic.fully_shard(
            nn.Linear(2, 2), shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim > 1 else None
        )
    with pytest.raises(AssertionError, match="does not fit a parameter of shape"):
        laconic.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: Shard(1))
    with pytest.raises(ValueError, match="must return a Shard"):
        laconic.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: "rows")


@on_ranks(2, local=1)
def test_models_can_be_cast_after_fully_shard() -> None:
    model: Any = sharded_net.shard(sharded_net.build())
    model.to(torch.float64)
    assert all(parameter.dtype is torch.float64 for parameter in model.parameters())
    plain = sharded_net.build().to(torch.float64)
    x = sharded_net.inputs(0, 0)[0].double()
    found = model(x)
    torch.testing.assert_close(found, plain(x), rtol=0, atol=0)
    found.sum().backward()
    assert all(parameter.grad.dtype is torch.float64 for parameter in model.parameters())
    cached: Any = sharded_net.shard(sharded_net.build(), cache="host")
    cached(x.float())
    with pytest.raises(ValueError, match="after the first forward, as the cache has memory"):
        cached.to(torch.float64)
