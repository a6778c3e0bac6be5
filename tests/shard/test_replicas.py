"""Replicas (HSDP): islands that sum their gradients in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks


@pytest.mark.parametrize(
    ("world", "names", "accumulation"),
    [(2, ("dp_replicate", "dp_shard"), 1), (4, ("outer", "inner"), 1), (6, ("dp_replicate", "dp_shard"), 3)],
)
@on_ranks("world", local=1)
def test_replicas_train_as_one_model(names: tuple[str, str], accumulation: int) -> None:
    """Train two steps as the mean over all ranks, and count the bytes between the replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    other = sharded_net.shard(sharded_net.build(), mesh=mesh)
    laconic.LocalSteps(other, torch.optim.SGD(other.parameters()), mesh=mesh)  # islands of another model change nothing
    model: Any = sharded_net.shard(sharded_net.build(), mesh=mesh, cache="host")
    plain, world = sharded_net.build(), dist.get_world_size()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]
    replicate, cut = model.inp.weight.placements
    assert replicate.is_replicate()
    assert not cut.is_replicate()
    for seed in range(2):
        with sharded_net.moved(model) as moved:
            for micro_batch in range(accumulation):
                model.set_requires_all_reduce(micro_batch == accumulation - 1)
                sharded_net.squared_error(
                    model, sharded_net.inputs(10 * seed + micro_batch, dist.get_rank())
                ).backward()
        for rank in range(world):
            for micro_batch in range(accumulation):
                batch = sharded_net.inputs(10 * seed + micro_batch, rank)
                (sharded_net.squared_error(plain, batch) / world).backward()
        for name, gradient in sharded_net.full_gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
        shards = sum(bucket.layout.shard_numel * 4 for bucket in sharded_net.buckets(model))
        assert moved.sent("island", "gradients") == shards, "2 (R - 1) / R of each shard, R = 2, once per step"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, whole in sharded_net.full_parameters(model).items():
        torch.testing.assert_close(whole, plain.get_parameter(name).detach(), msg=name)


@on_ranks(4, local=1)
def test_units_may_synchronise_replicas_at_different_times() -> None:
    """Only the root sums its gradients over the replicas in the first backward; all units do in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model: Any = sharded_net.shard(sharded_net.build(), mesh=mesh)
    plain, world = sharded_net.build(), dist.get_world_size()
    for micro_batch in range(2):
        for block in model.blocks:
            block.set_requires_gradient_sync(micro_batch == 1)
        sharded_net.squared_error(model, sharded_net.inputs(micro_batch, dist.get_rank())).backward()
        for rank in range(world):
            (sharded_net.squared_error(plain, sharded_net.inputs(micro_batch, rank)) / world).backward()
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)


@on_ranks(2, local=1)
def test_replicas_agree_on_the_parameters_that_were_used() -> None:
    """A gradient that only one replica has reaches the other; one that none has stays None."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.forward = lambda x: model[0](x) + (model[1](x) if dist.get_rank() == 0 else 0)
    laconic.fully_shard(model, mesh=mesh)
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model[1].bias.grad.full_tensor(), torch.ones(3))  # the mean of 2 and nothing
    assert model[2].bias.grad is None
