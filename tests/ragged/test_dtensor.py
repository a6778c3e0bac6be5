"""Tensor and expert parallelism on another mesh axis: the same numbers, norms and checkpoints as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import laconic
from tests.support.launch import on_ranks
from tests.support.sharded_net import Net, assert_nothing_gathered, build, full_parameters, squared_error

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def batch(seed: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + replica)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def tensor_parallel(replicas: int, cache: str, *, seed: int = 0, hidden: int = 30) -> Any:
    """`Net` with its blocks' matrices cut over ("tp",) and everything cut over ("dp",)."""
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "tp"))
    model = build(lambda: Net(2, 17, hidden), seed=seed)
    data = mesh["dp"]
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], PLAN)
        laconic.fully_shard(block, mesh=data, cache=cache)
    return laconic.fully_shard(model, mesh=data, cache=cache), mesh


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (3, 1)])
@on_ranks("ranks", local=1)
def test_tensor_parallel_training_is_the_unsharded_one(replicas: int, tmp_path: Path) -> None:
    model, mesh = tensor_parallel(replicas, "host")
    plain = build(lambda: Net(2, 17, 30))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, plain)]
    replica = mesh.get_local_rank("dp")
    for step in range(2):
        squared_error(model, batch(step, replica)).backward()
        sum(squared_error(plain, batch(step, r)) for r in range(replicas)).div(replicas).backward()  # type: ignore[union-attr]
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=lambda text, name=name: f"{name}: {text}")
        for foreach in (True, False):
            norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=foreach) for net in (model, plain)]
            torch.testing.assert_close(norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_nothing_gathered(model)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name), msg=name)

    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    other = laconic.init_mesh("cpu")  # every rank for data, none for tensors
    again = build(lambda: Net(2, 17, 30), seed=1)
    for block in again.blocks:  # type: ignore[union-attr]
        laconic.fully_shard(block, mesh=other)
    laconic.fully_shard(again, mesh=other)
    dcp.load({"model": again.state_dict()}, checkpoint_id=tmp_path)
    for name, value in full_parameters(again).items():
        torch.testing.assert_close(value, plain.get_parameter(name), msg=name)
    back, _ = tensor_parallel(replicas, "none", seed=2)
    dcp.load({"model": back.state_dict()}, checkpoint_id=tmp_path)
    for name, value in full_parameters(back).items():
        torch.testing.assert_close(value, plain.get_parameter(name), msg=name)
