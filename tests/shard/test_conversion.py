"""Parameters that convert themselves before the gather, as elements or as bytes, against rounding in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter as preserve_version
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor

import laconic
from laconic.shard.policies import Checks, Wire
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


class Uneven(Float8Weight):
    """A weight whose conversion makes another number of tensors on each rank."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:  # type: ignore[override]
        return (self._data,) * (1 + dist.get_rank()), None


def converting(model: nn.Module, weight_class: type[Float8Weight] = Float8Weight) -> nn.Module:
    """Make the weights of the blocks convert themselves."""
    for block in model.blocks:  # type: ignore[union-attr]
        for linear in (block.up, block.down):  # type: ignore[union-attr]
            trains = linear.weight.requires_grad
            linear.weight = nn.Parameter(weight_class(linear.weight.detach()), requires_grad=trains)
    return model


def rounded_to_float8(weight: Tensor) -> Tensor:
    scale = scale_of(weight.abs().max())
    return (weight * scale).to(FLOAT8).to(weight.dtype) / scale


class Rounded(nn.Module):
    """The oracle: the weights of the blocks, rounded in one process, with the gradient of the identity."""

    def __init__(self, model: nn.Module, rounding: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._rounding = model, rounding

    def forward(self, x: Tensor) -> Tensor:
        rounded = {
            name: weight + (self._rounding(weight.detach()) - weight).detach()
            for name, weight in self.model.named_parameters()
            if name.startswith("blocks") and name.endswith("weight")
        }
        return functional_call(self.model, rounded, (x,))


def train_as_oracle(model: Any, rounding: Callable[[Tensor], Tensor], *, steps: int = 3) -> list[int]:
    """Train a sharded model, whose elements are those of `sharded_net.build()`, beside the oracle.

    Returns the bytes of weights that each step has sent across the nodes.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = sharded_net.build()
    oracle = Rounded(plain, rounding)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.05, foreach=True) for module in (model, plain)]
    sent = []
    for seed in range(steps):
        with sharded_net.moved(model) as moved:
            loss = sharded_net.squared_error(model, sharded_net.inputs(seed, rank))
            loss.backward()
        sent.append(moved.weights)
        wanted = [sharded_net.squared_error(oracle, sharded_net.inputs(seed, each)) for each in range(world)]
        torch.testing.assert_close(loss, wanted[rank])
        torch.stack(wanted).mean().backward()
        for name, gradient in sharded_net.full_gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, whole in sharded_net.full_parameters(model).items():
        torch.testing.assert_close(whole, plain.get_parameter(name).detach(), msg=name)
    return sent


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("world", "local", "weight_class", "options", "gathers"),
    [
        (1, 1, Float8Weight, {}, 2),
        (3, 1, ScaledOnly, {}, 2),
        (4, 2, Float8Weight, {"cache": "host"}, 1),
        (3, 1, Float8Weight, {"cache": "device"}, 1),
        (2, 1, Float8Weight, {"reshard_after_forward": False}, 1),
        (4, 2, Float8Weight, {"cache": "rank"}, 1),
        (2, 1, Float8Weight, {"cache": "host", "offload_policy": CPUOffloadPolicy()}, 1),
    ],
    ids=["alone", "none", "host", "device", "kept", "rank", "offloaded"],
)
@on_ranks("world", local="local")
def test_converted_weights_train_as_rounded_ones(
    weight_class: type[Float8Weight], options: dict[str, Any], gathers: int
) -> None:
    """Three steps as the oracle's; converted weights cross as bytes."""
    model: Any = sharded_net.shard(converting(sharded_net.build(), weight_class), **options)
    blocks = [bucket for bucket in sharded_net.buckets(*model.blocks) if bucket.form.dtype is FLOAT8]
    assert len(blocks) == 3
    num_root = len(sharded_net.buckets(model)) - len(sharded_net.buckets(*model.blocks))
    of_root, of_blocks = sharded_net.buckets(model)[:num_root], sharded_net.buckets(model)[num_root:]
    expected = sharded_net.gather_bytes("node", of_root) + gathers * sharded_net.gather_bytes("node", of_blocks)
    assert train_as_oracle(model, rounded_to_float8) == [expected] * 3
    if options.get("reshard_after_forward", True):
        sharded_net.assert_nothing_gathered(model)


@on_ranks(2, local=1)
def test_frozen_converted_weights_cross_once() -> None:
    """Frozen converted weights cross the wire once, and their scales stay."""
    model = sharded_net.build()
    model.blocks.requires_grad_(False)
    oracle = Rounded(sharded_net.build(), rounded_to_float8)
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
    uneven = sharded_net.shard(converting(sharded_net.build(), Uneven))
    with pytest.raises(NotImplementedError, match=r"up.weight made \[1, 2\] tensors on the ranks.*alike on all ranks"):
        uneven(sharded_net.inputs(0, 0)[0])


def test_conversions_of_other_shapes_are_refused() -> None:
    run_ranks(job_refusals, 2, local=1)


class RowScaled(Float8Weight):
    """A weight that crosses as int8, with one float32 scale per row."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:  # type: ignore[override]
        assert self._data.ndim == 2, "whole rows come as rows"
        scales = self._data.abs().amax(1).clamp(min=1e-12) / 127
        return ((self._data / scales[:, None]).round().to(torch.int8), scales), "metadata"

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        codes, scales = all_gather_outputs
        assert len(codes) == len(scales)
        weight = (codes * scales[:, None]).to(param_dtype)
        if out is None:
            return weight, (codes, scales, weight)
        with preserve_version(out):
            out.copy_(weight)
        return None


def rounded_by_rows(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scales[:, None]).round().to(torch.int8) * scales[:, None]


class BF16InChunks(Float8Weight):
    """A weight that crosses in bfloat16, filled up to the equal chunks that FSDP2 gathers, as in torch's test."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], Any]:
        chunk = torch.full((math.ceil(outer_size[0] / mesh.size()), *outer_size[1:]), 77, dtype=torch.bfloat16)
        chunk[: self._data.size(0)].copy_(self._data)
        return (chunk,), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (tensor,) = all_gather_outputs
        assert tensor.dtype == torch.bfloat16
        if out is None:
            weight = tensor.to(param_dtype)
            return weight, (tensor, weight)
        with preserve_version(out):
            out.copy_(tensor)
        return None


def rounded_to_bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).to(weight.dtype)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("world", "local", "options"),
    [
        (1, 1, {}),
        (3, 1, {"checks": Checks(interval=1)}),
        (4, 2, {"cache": "host"}),
        (3, 1, {"cache": "device", "offload_policy": CPUOffloadPolicy()}),
        (2, 1, {"reshard_after_forward": False}),
        (4, 2, {"cache": "rank"}),
    ],
    ids=["alone", "checked", "host", "device", "kept", "rank"],
)
@on_ranks("world", local="local")
def test_elements_and_their_scales_are_gathered_together(options: dict[str, Any]) -> None:
    model: Any = sharded_net.shard(converting(sharded_net.build(), RowScaled), granularity=laconic.rows(1), **options)
    train_as_oracle(model, rounded_by_rows)
    packed = [bucket for bucket in sharded_net.buckets(*model.blocks) if bucket.form.is_packed]
    assert len(packed) == 3
    for bucket in packed:
        shard, numel = bucket.form.packing.shard_nbytes, sum(slot.numel for slot in bucket.layout.slots)
        rows = sum(slot.shape[0] for slot in bucket.layout.slots)
        assert bucket.form.dtype is torch.uint8
        assert numel + 4 * rows <= shard * bucket.cluster.size, "codes and scales"
    with sharded_net.moved(model) as m:
        sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
    nodes = packed[0].cluster.num_nodes
    expected = sum(
        (nodes - 1) * bucket.form.numel * bucket.form.dtype.itemsize for bucket in sharded_net.buckets(model)
    )
    if options.get("cache", "none") != "none":
        assert m.weights == expected, "each shard crosses once, with its scales"
    if options.get("reshard_after_forward", True):
        sharded_net.assert_nothing_gathered(model)


@pytest.mark.parametrize(("world", "options"), [(2, {"cache": "host"}), (4, {})], ids=["two", "four"])
@on_ranks("world", local=1)
def test_conversions_that_fill_up_equal_chunks(options: dict[str, Any]) -> None:
    model: Any = sharded_net.shard(converting(sharded_net.build(), BF16InChunks), **options)
    train_as_oracle(model, rounded_to_bf16)
    converted = [bucket for bucket in sharded_net.buckets(*model.blocks) if bucket.form.dtype is torch.bfloat16]
    assert len(converted) == 6, "each has a bucket of its own, cut as FSDP2 cuts"
    for bucket in converted:
        (slot,) = bucket.layout.slots
        assert bucket.layout.shard_numel == math.ceil(slot.shape[0] / bucket.cluster.size) * slot.shape[1]


class Twins(TwoTensor):  # type: ignore[misc]
    """A weight of two tensors, which are gathered as they are, as in torch's test."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        a, b = all_gather_outputs
        if out is None:
            return TwoTensor(a, b), (a, b)
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
        assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
        return None


def train_twins(fully_shard: Any, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Take three steps. Returns the losses and the weights."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 10, bias=False), nn.ReLU(), nn.Linear(10, 8, bias=False)) for _ in range(2)]
    for linear in (block[at] for block in blocks for at in (0, 2)):
        linear.weight = nn.Parameter(Twins(linear.weight.detach(), linear.weight.detach().clone()))
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss: Any = (model(torch.randn(4, 8, generator=generator)) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.a.detach())
    wholes: list[Any] = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[operator]
    return losses, [getattr(whole, "a", whole).detach() for whole in wholes]


@on_ranks(2, local=1)
def test_weights_of_two_tensors_train_as_under_fsdp2() -> None:
    wanted = train_twins(torch_fully_shard)
    for options in ({}, {"reshard_after_forward": False}, {"cache": "host"}):
        torch.testing.assert_close(train_twins(laconic.fully_shard, **options), wanted)
    other = nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(Twins(torch.zeros(4, 4), torch.ones(4, 4)))
    with pytest.raises(NotImplementedError, match=r"a Twins .* consists of 2 tensors \(a, b\).* several equal ones"):
        laconic.fully_shard(other)


# -- methods on local tensors ------------------------------------------------------------------------------------------


def to_bf16(self: Tensor, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    assert outer_size == module.weight.shape
    return (self.to(torch.bfloat16),), None


def to_bf16_with_largest(self: Tensor, mesh: DeviceMesh) -> Any:
    """As `to_bf16`, with another tensor, of one element for each rank that has any."""
    return (self.to(torch.bfloat16), self.abs().amax(0, keepdim=True) if self.numel() else self.new_zeros(0)), None


@torch.no_grad()
def from_bf16(self: Tensor, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    tensor = gathered[0]
    if len(gathered) > 1:
        torch.testing.assert_close(gathered[1].max(), tensor.abs().max().float(), rtol=1e-2, atol=0)
    if out is not None:
        with preserve_version(out):
            out.copy_(tensor)
        return None
    weight = tensor.to(dtype)
    return weight, (tensor, weight)


def patch(model: nn.Module, before: Callable[..., Any] = to_bf16) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.startswith("blocks") and name.endswith("weight"):
            local = parameter._local_tensor  # type: ignore[attr-defined]
            local.fsdp_pre_all_gather = before.__get__(local)
            local.fsdp_post_all_gather = from_bf16.__get__(local)
    return model


@pytest.mark.parametrize(
    ("before", "options"),
    [(to_bf16, {}), (to_bf16_with_largest, {"cache": "host"})],
    ids=["one_tensor", "two_tensors_cached"],
)
@on_ranks(3, local=1)
def test_methods_on_local_tensors_are_called(before: Callable[..., Any], options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model: Any = sharded_net.Net()
    sharded_net.shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, value in sharded_net.build().state_dict().items():
            model.get_parameter(name).copy_(value)
    train_as_oracle(patch(model, before), rounded_to_bf16)
    assert sum(bucket.form.is_packed for bucket in sharded_net.buckets(*model.blocks)) == 3, (
        "weights in bf16, biases in fp32"
    )


@on_ranks(2, local=1)
def test_methods_on_local_tensors_are_never_ignored() -> None:
    batch = sharded_net.inputs(0, 0)[0]
    late: Any = sharded_net.shard(sharded_net.build())
    late(batch)
    patch(late)
    with pytest.raises(RuntimeError, match=r"_local_tensor of .*weight.* after the first forward; put it there before"):
        late(batch)
    coded: Any = sharded_net.shard(sharded_net.build(), cache="host", wire=Wire(weights="int8"))
    patch(coded)
    with pytest.raises(NotImplementedError, match=r"cross as Wire\(weights='int8'\); use weights='exact'"):
        coded(batch)
    moved: Any = patch(sharded_net.shard(sharded_net.build()))
    moved(batch)
    moved.to(torch.float64)
    with pytest.raises(RuntimeError, match=r"whose memory has moved since.*put it on the new _local_tensor"):
        moved(batch.double())
