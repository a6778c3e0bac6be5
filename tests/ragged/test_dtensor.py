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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import laconic
from tests.support.launch import on_ranks
from tests.support.sharded_net import Block, Net, assert_nothing_gathered, build, full_parameters, squared_error

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


class Experts(nn.Module):
    """Expert e multiplies the e-th row of every sample; each rank of "ep" computes its own experts."""

    def __init__(self, num: int = 4, d: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, d, d))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not isinstance(weight, DTensor):
            return torch.einsum("bed,edf->bef", x, weight)
        mesh, rank = weight.device_mesh, weight.device_mesh.get_local_rank()
        local = weight.to_local()
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        output = torch.einsum("bed,edf->bef", x[:, rank * len(local) : (rank + 1) * len(local)], local)
        return DTensor.from_local(output, mesh, [Shard(1)]).full_tensor(grad_placements=[Replicate()])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 28)
        self.experts = Experts()
        self.out = nn.Linear(28, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.experts(self.inp(x).view(-1, 4, 7))
        return self.out(h.flatten(1))


@on_ranks(4, local=1)
def test_experts_on_their_own_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, plain = build(Mixture), build(Mixture)
    cut = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])  # type: ignore[union-attr, arg-type]
    model.experts.weight = nn.Parameter(cut)  # type: ignore[union-attr, arg-type]
    laconic.fully_shard(model.experts, mesh=mesh["dp"])  # type: ignore[arg-type]  # experts: over the ranks that share them
    laconic.fully_shard(model, mesh=laconic.init_mesh("cpu", local=1))  # the rest: over all ranks
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, plain)]
    for step in range(2):
        # Both ranks of "ep" see the same rows, so every expert gets the gradient of its replica's rows whole.
        data = [torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        model(data[mesh.get_local_rank("dp")]).square().mean().backward()
        sum(plain(rows).square().mean() for rows in data).div(2).backward()  # type: ignore[union-attr]
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[union-attr]
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net in (model, plain)]
        torch.testing.assert_close(norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name), msg=name)


@on_ranks(2, local=1)
def test_unsupported_meshes_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    whole = laconic.init_mesh("cpu", local=1)
    block = parallelize_module(Block(), mesh["tp"], PLAN)
    with pytest.raises(ValueError, match=r"is a DTensor over ranks \[0, 1\], which are in the mesh of fully_shard"):
        laconic.fully_shard(block, mesh=whole)
