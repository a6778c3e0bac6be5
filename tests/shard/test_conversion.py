"""Parameters that convert themselves before the gather, by FSDP2's two methods, against rounding in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.func import functional_call

from tests.support import sharded_net
from tests.support.float8 import FLOAT8, Float8Weight, scale_of
from tests.support.launch import on_ranks, run_ranks


class ScaledOnly(Float8Weight):
    """The protocol of torchao: `fsdp_pre_all_gather` takes the mesh only."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:  # type: ignore[override]
        scale = scale_of(all_reduce(self._data.abs().max(), "MAX", mesh.get_group()))
        return ((self._data * scale).to(FLOAT8),), (scale,)


class Pair(Float8Weight):
    """A weight of two tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_other"], None


class Longer(Float8Weight):
    """A weight whose conversion adds an element, which it does not take away again."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:  # type: ignore[override]
        return (self._data.new_zeros(self._data.numel() + 1),), (torch.ones(()),)


def converting(model: nn.Module, weight_class: type[Float8Weight] = Float8Weight) -> nn.Module:
    """Make the weights of the blocks convert themselves."""
    for block in model.blocks:  # type: ignore[union-attr]
        for linear in (block.up, block.down):  # type: ignore[union-attr]
            trains = linear.weight.requires_grad
            linear.weight = nn.Parameter(weight_class(linear.weight.detach()), requires_grad=trains)
    return model


class Rounded(nn.Module):
    """The oracle: the weights of the blocks rounded to float8 in one process, with the gradient of the identity."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        rounded = {}
        for name, weight in self.model.named_parameters():
            if name.startswith("blocks") and name.endswith("weight"):
                scale = scale_of(weight.detach().abs().max())
                value = (weight.detach() * scale).to(FLOAT8).to(weight.dtype) / scale
                rounded[name] = weight + (value - weight).detach()
        return functional_call(self.model, rounded, (x,))


@pytest.mark.parametrize(
    ("world", "local", "weight_class", "options", "gathers"),
    [
        (1, 1, Float8Weight, {}, 2),
        (3, 1, ScaledOnly, {}, 2),
        (4, 2, Float8Weight, {"cache": "host"}, 1),
        (3, 1, Float8Weight, {"cache": "device"}, 1),
        (2, 1, Float8Weight, {"reshard_after_forward": False}, 1),
        (2, 1, Float8Weight, {"cache": "host", "offload_policy": CPUOffloadPolicy()}, 1),
    ],
    ids=["alone", "none", "host", "device", "kept", "offloaded"],
)
@on_ranks("world", local="local")
def test_converted_weights_train_as_rounded_ones(
    weight_class: type[Float8Weight], options: dict[str, Any], gathers: int
) -> None:
    """Three steps as the oracle's, whose first two micro-batches are one step; converted weights cross as bytes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = sharded_net.build()
    oracle = Rounded(plain)
    model: Any = sharded_net.shard(converting(sharded_net.build(), weight_class), **options)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.05, foreach=True) for module in (model, plain)]
    blocks = [bucket for bucket in sharded_net.buckets(*model.blocks) if bucket.form.dtype is FLOAT8]
    assert len(blocks) == 3
    rest = [bucket for bucket in sharded_net.buckets(model) if bucket not in blocks]
    for seed in range(3):
        with sharded_net.moved(model) as moved:
            loss = sharded_net.squared_error(model, sharded_net.inputs(seed, rank))
            loss.backward()
        wanted = [sharded_net.squared_error(oracle, sharded_net.inputs(seed, each)) for each in range(world)]
        torch.testing.assert_close(loss, wanted[rank])
        torch.stack(wanted).mean().backward()
        for name, gradient in sharded_net.full_gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
        root_buckets = sharded_net.buckets(model)[
            : len(sharded_net.buckets(model)) - len(sharded_net.buckets(*model.blocks))
        ]
        twice = [bucket for bucket in rest if bucket not in root_buckets]
        expected = sharded_net.gather_bytes("node", root_buckets) + gathers * sharded_net.gather_bytes(
            "node", blocks + twice
        )
        assert moved.weights == expected
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    sharded_net.assert_nothing_gathered(model) if options.get("reshard_after_forward", True) else None
    for name, whole in sharded_net.full_parameters(model).items():
        torch.testing.assert_close(whole, plain.get_parameter(name).detach(), msg=name)


@on_ranks(2, local=1)
def test_frozen_converted_weights_cross_once() -> None:
    """Frozen converted weights cross the wire once, and their scales stay."""
    model = sharded_net.build()
    model.blocks.requires_grad_(False)
    oracle = Rounded(sharded_net.build())
    model: Any = sharded_net.shard(converting(model), cache="host")
    batch = sharded_net.inputs(0, 0)
    for step in range(2):
        with sharded_net.moved(model) as moved:
            sharded_net.squared_error(model, batch).backward()
        assert bool(moved.weights) == (step == 0)
        torch.testing.assert_close(model(batch[0]), oracle(batch[0]))
        model.zero_grad()


@on_ranks(4, local=1)
def test_conversion_starts_on_meta_and_spares_replicas() -> None:
    """On the meta device first, over replicas, in bfloat16: only the mesh that shards converts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with torch.device("meta"):
        model: Any = converting(sharded_net.Net())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded_net.shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert sharded_net.buckets(model)[0].cluster.shard_mesh.size() == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [float(sharded_net.train_step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]


def job_refusals() -> None:
    pair = converting(sharded_net.build(), Pair)
    for parameter in pair.parameters():
        parameter._other = torch.zeros(3)
    with pytest.raises(NotImplementedError, match=r"up.weight is a Pair .* consists of 2 tensors .*ignored_params"):
        sharded_net.shard(pair)
    longer = sharded_net.shard(converting(sharded_net.build(), Longer))
    with pytest.raises(NotImplementedError, match=r"post_all_gather of .* made a tensor of shape .*; forward needs"):
        longer(sharded_net.inputs(0, 0)[0])


def test_conversions_of_other_shapes_are_refused() -> None:
    run_ranks(job_refusals, 2, local=1)
