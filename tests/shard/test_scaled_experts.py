"""Experts that are gathered in scaled formats, under every cache, against the same rounding in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

import laconic
from laconic.layers.scaled import SCALED_FORMATS
from tests.reference.scaled import stack_products
from tests.reference.step import Oracle
from tests.support import sharded_net
from tests.support.launch import on_ranks

CACHES = ["none", "host", "device", "rank", "auto"]
SOON = ("fp8_128x128", "nvfp4")
"""Blocks of many rows, and a scale for each matrix; the others are tried with the tests that compute for long."""
FORMATS = [pytest.param(name, marks=() if name in SOON else pytest.mark.heavy) for name in SCALED_FORMATS]
LR = 0.125


class Experts(nn.Module):
    """Four experts that get a token in four each, one after the other or all in one grouped product."""

    weight_format: str | None = None
    """The oracle's, which rounds by itself."""

    def __init__(self, d: int = 16, h: int = 128, *, is_grouped: bool = False) -> None:
        super().__init__()
        self.up, self.is_grouped = nn.Parameter(torch.randn(4, h, d) / d), is_grouped

    def forward(self, x: Tensor) -> Tensor:
        up = self.up
        if not isinstance(up, DTensor):
            return x + self.terms(x, up)
        mesh = up.device_mesh
        rows = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        first = mesh.get_local_rank() * len(up.to_local())
        terms = DTensor.from_local(self.terms(rows, up.to_local(), first), mesh, [Partial()])
        return x + terms.redistribute(placements=[Replicate()]).to_local()

    def terms(self, x: Tensor, up: Tensor, first: int = 0) -> Tensor:
        inputs = [x[first + expert :: 4] for expert in range(len(up))]
        if self.weight_format is not None:
            outputs = stack_products(inputs, up, self.weight_format, together=self.is_grouped)
        elif self.is_grouped:
            offs = torch.tensor([len(each) for each in inputs]).cumsum(0).to(torch.int32)
            joined = functional.grouped_mm(torch.cat(inputs), up.transpose(1, 2), offs=offs)
            outputs = list(joined.split([len(each) for each in inputs]))
        else:
            outputs = [functional.linear(own, up[expert]) for expert, own in enumerate(inputs)]
        total = torch.zeros_like(x)
        for expert, output in enumerate(outputs):
            index = torch.arange(first + expert, len(x), 4)
            total = total.index_add(0, index, output.tanh()[:, : x.shape[1]] + output[:, -x.shape[1] :])
        return total


class Net(nn.Module):
    def __init__(self, *, is_grouped: bool) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(5, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Experts(is_grouped=is_grouped) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def converted(model: nn.Module, weight_format: str, **options: Any) -> nn.Module:
    return laconic.convert_to_scaled_training(
        model,
        weight_format,
        module_filter_fn=lambda module, _: isinstance(module, Experts),  # type: ignore[arg-type]
        **options,
    )


def train_beside_oracle(model: Any, make: Any, weight_format: str, cluster: Any, rank: int) -> None:
    rounding: Any = sharded_net.build(make)
    for block in rounding.blocks:
        block.weight_format = weight_format
    oracle = Oracle(rounding, sharded_net.squared_error, num_nodes=cluster[0], num_local=cluster[1])
    for step in range(2):  # `cache="auto"` places before the second
        batches = [[sharded_net.inputs(step, each, rows=6) for each in range(cluster[0] * cluster[1])]]
        loss = sharded_net.squared_error(model, batches[0][rank])
        loss.backward()
        losses, wanted = oracle.gradients(batches)
        assert loss.item() == pytest.approx(losses[0][rank].item(), rel=1e-6)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.full_tensor()
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
                parameter -= LR * parameter.grad
                oracle.parameters()[name].copy_(parameter.full_tensor())
        model.zero_grad()


@pytest.mark.parametrize("weight_format", FORMATS)
@on_ranks(2, local=1)
def test_experts_of_every_cache(weight_format: str) -> None:
    for place, cache in enumerate(CACHES):
        make = partial(Net, is_grouped=place % 2 == 0)
        model = sharded_net.shard(converted(sharded_net.build(make), weight_format), cache=cache)
        train_beside_oracle(model, make, weight_format, (2, 1), dist.get_rank())
        of_blocks = sharded_net.buckets(*model.blocks)
        packed = [bucket for bucket in of_blocks if bucket.form.is_packed]
        assert len(packed) == len(of_blocks) == 2


@on_ranks(4, local=1)
def test_ranks_may_share_blocks_of_experts() -> None:
    """Also of those that expert parallelism has left to them."""
    laconic.init_mesh("cpu")
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "local", "experts"))
    outer, mesh, make = whole["experts"], whole["node", "local"], partial(Net, is_grouped=False)
    model: Any = converted(sharded_net.build(make), "fp8_128x128", shares_blocks=True)
    for block in model.blocks:
        block.up = nn.Parameter(distribute_tensor(block.up.detach(), outer, [Shard(0)], src_data_rank=None))
    sharded_net.shard(model, cache="host", mesh=mesh)
    train_beside_oracle(model, make, "fp8_128x128", (2, 1), mesh["node"].get_local_rank())
    assert not any(bucket.form.is_packed for bucket in sharded_net.buckets(*model.blocks))


@pytest.mark.parametrize("weight_format", FORMATS)
@on_ranks(4, local=1)
def test_experts_that_expert_parallelism_has_cut(weight_format: str) -> None:
    """Two ranks share the experts of a layer, and two share each of these: whichever call comes first."""
    laconic.init_mesh("cpu")
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "local", "experts"))
    outer, mesh = whole["experts"], whole["node", "local"]
    for place, cache in enumerate(CACHES):
        # a grouped product in NVFP4 rounds by the largest of all inputs, of which a rank has its experts' own
        make = partial(Net, is_grouped=place % 2 == 0 and weight_format != "nvfp4")
        model: Any = sharded_net.build(make)
        if place % 2:
            converted(model, weight_format)
        for block in model.blocks:
            cut = distribute_tensor(block.up.detach(), outer, [Shard(0)], src_data_rank=None)
            block.up = nn.Parameter(cut)
        if not place % 2:
            converted(model, weight_format)
        sharded_net.shard(model, cache=cache, mesh=mesh)
        train_beside_oracle(model, make, weight_format, (2, 1), mesh["node"].get_local_rank())
        assert all(bucket.form.is_packed for bucket in sharded_net.buckets(*model.blocks))
