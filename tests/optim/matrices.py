"""Matrices cut over a cluster, with given values and gradients, for the tests of Muon, Shampoo and their owners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.comm.cluster import Cluster
from laconic.layout.packing import plan_bucket
from laconic.optim import matrices_and_rest
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from tests.support.owner_bytes import sum_over_ranks
from tests.support.sharded_net import build, full_gradients, full_parameters, inputs, shard, squared_error

Shape = tuple[int, ...]


def cut_specs(
    shapes: Sequence[Shape], cluster: Cluster, *, block: int | None = None, per_bucket: int = 3
) -> list[RaggedSpec]:
    """Slots for `shapes`, a few per bucket; blocks of one row by default, 0 for whole tensors."""
    specs: list[RaggedSpec] = []
    for begin in range(0, len(shapes), per_bucket):
        chosen = list(shapes[begin : begin + per_bucket])
        names = [f"t{begin + index}" for index in range(len(chosen))]
        blocks = [_block(shape, block) for shape in chosen]
        layout = plan_bucket(names, chosen, blocks, num_shards=cluster.size, itemsize=4)
        specs += [RaggedSpec(cluster=cluster, layout=layout, index=index) for index in range(len(chosen))]
    return specs


def _block(shape: Shape, block: int | None) -> int:
    if block is None:
        return shape[-1] if len(shape) > 1 else 1
    return max(1, block or math.prod(shape))


def cut(whole: Tensor, spec: RaggedSpec) -> RaggedTensor:
    return RaggedTensor(spec.part_of(whole).clone(), spec)


def random_tensors(shapes: Sequence[Shape], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same on every rank and in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def parameters(values: Sequence[Tensor], specs: Sequence[RaggedSpec]) -> list[nn.Parameter]:
    return [nn.Parameter(cut(value, spec)) for value, spec in zip(values, specs, strict=True)]


def set_grads(params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    for parameter, grad in zip(params, grads, strict=True):
        if grad is None:
            parameter.grad = None
        elif isinstance(parameter, RaggedTensor):
            parameter.grad = cut(grad, parameter.spec)
        else:
            parameter.grad = grad.clone()


def job_training(optimizer_class: type[torch.optim.Optimizer], settings: dict[str, Any]) -> list[float]:
    """Train a sharded model for some steps, and give its gradients to an unsharded twin; return the losses."""
    model, twin = shard(build()), build()
    optimizer, twin_optimizer = (optimizer_class(matrices_and_rest(m), **settings) for m in (model, twin))
    losses = []
    for _ in range(6):
        loss = squared_error(model, inputs(0, dist.get_rank()))
        loss.backward()
        for name, grad in full_gradients(model).items():
            twin.get_parameter(name).grad = grad
        optimizer.step()
        twin_optimizer.step()
        model.zero_grad()
        for name, parameter in full_parameters(model).items():
            assert torch.equal(parameter, twin.get_parameter(name)), name
        losses.append(float(loss.detach()))
    return losses


def assert_same_owners(results: Sequence[dict[str, Any]]) -> None:
    """All ranks have the same owners, and matrices move if there are several ranks."""
    assert all(result == results[0] for result in results)
    assert (results[0]["moved"] == 0) == (len(results) == 1)


def optimizer_bytes(cluster: Cluster) -> int:
    """Received so far under purpose "optimizer", by all ranks. Collective."""
    snapshot = cluster.traffic.snapshot()
    received = sum_over_ranks(snapshot.total(purpose="optimizer", direction="received"))
    assert received == sum_over_ranks(snapshot.total(purpose="optimizer", direction="sent"))
    return received
