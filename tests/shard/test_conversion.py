"""Parameters that convert themselves before the gather, as elements or as bytes, against rounding in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter as preserve_version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor

import laconic
from laconic.rehearse import RankError
from laconic.shard.policies import Checks, Wire
from tests.support.float8 import FLOAT8, Float8Weight, scale_of
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_equals_oracle
from tests.support.sharded_net import Net, buckets, build, gather_bytes, inputs, shard, small_net, train_step


class Coded(Float8Weight):
    """A weight that crosses as `coded` makes it, and is what `shown` makes of that."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:  # type: ignore[override]
        return self.coded(self._data), "metadata"

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        return decoded(self.shown(*all_gather_outputs).to(param_dtype), all_gather_outputs, out)

    def coded(self, data: Tensor) -> tuple[Tensor, ...]:
        """In one part."""
        return (data,)

    def shown(self, part: Tensor) -> Tensor:
        """The weight."""
        return part


def decoded(weight: Tensor, gathered: tuple[Tensor, ...], out: Tensor | None) -> Any:
    """What the second half of a conversion returns: a weight and what it needs, or nothing if `out` is to have it."""
    if out is None:
        return weight, (*gathered, weight)
    with preserve_version(out):
        out.copy_(weight)
    return None


class Longer(Coded):
    """A weight whose conversion adds an element, which it does not take away again."""

    def coded(self, data: Tensor) -> tuple[Tensor, ...]:
        return (data.new_zeros(data.numel() + 1),)


class Uneven(Coded):
    """A weight whose conversion makes another number of tensors on each rank."""

    def coded(self, data: Tensor) -> tuple[Tensor, ...]:
        return (data,) * (1 + dist.get_rank())


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


def rounded(rounding: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """The loss of the oracle: with the weights of the blocks rounded, and the gradient of the identity."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = {
            name: weight + (rounding(weight.detach()) - weight).detach()
            for name, weight in model.named_parameters()
            if name.startswith("blocks") and name.endswith("weight")
        }
        return (functional_call(model, weights, (batch[0],)) - batch[1]).square().mean()

    return loss


def with_weights(
    weight_class: type[Float8Weight], rounding: Callable[[Tensor], Tensor], scenario: Scenario, **options: Any
) -> Scenario:
    """A scenario of a small net whose weights convert themselves."""
    prepare, options = partial(converting, weight_class=weight_class), {**scenario.options, **options}
    return replace(scenario, make=small_net, prepare=prepare, oracle_loss=rounded(rounding), options=options)


OFFLOADED = {"offload_policy": CPUOffloadPolicy()}


@pytest.mark.parametrize(
    ("scenario", "gathers"),
    [
        (Scenario(nodes=3), 2),
        (Scenario(local=2, cache="host", options=OFFLOADED), 1),
        (Scenario(options={"reshard_after_forward": False}), 1),
        (Scenario(local=2, cache="rank"), 1),
    ],
    ids=["none", "offloaded host", "kept", "rank"],
)
def test_converted_weights_train_as_rounded_ones(scenario: Scenario, gathers: int) -> None:
    """Converted weights cross as bytes."""
    scenario = with_weights(Float8Weight, rounded_to_float8, scenario)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    model = runs[0].model
    of_blocks, of_root = buckets(*model.blocks), model._laconic_unit.buckets
    assert [bucket.form.dtype for bucket in of_blocks].count(FLOAT8) == 1
    expected = gather_bytes("node", of_root) + gathers * gather_bytes("node", of_blocks)
    assert [sent.weights for sent in runs[0].sent] == [expected] * scenario.steps


def test_frozen_converted_weights_cross_once() -> None:
    """Their scales stay."""

    def frozen() -> Any:
        model = small_net().requires_grad_(False)
        model.out.bias.requires_grad_(True)
        return model

    scenario = replace(with_weights(Float8Weight, rounded_to_float8, Scenario(cache="host")), make=frozen)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    first, second = (sent.weights for sent in runs[0].sent)
    assert first > second == gather_bytes("node", [b for b in buckets(runs[0].model) if not b.stored.is_frozen])


@on_ranks(4, local=1)
def test_conversion_starts_on_meta_and_spares_replicas() -> None:
    """On the meta device first, over replicas, in bfloat16: only the mesh that shards converts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with torch.device("meta"):
        model: Any = converting(small_net())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert buckets(model)[0].cluster.shard_mesh.size() == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    assert float(train_step(model, optimizer)) > float(train_step(model, optimizer))


@on_ranks(2, local=1)
def test_conversions_of_other_shapes_are_refused() -> None:
    longer = shard(converting(build(), Longer))
    with pytest.raises(NotImplementedError, match=r"post_all_gather of .* made a tensor of shape .*; forward needs"):
        longer(inputs(0, 0)[0])
    uneven = shard(converting(build(), Uneven))
    with pytest.raises(NotImplementedError, match=r"up.weight made \[1, 2\] tensors on the ranks.*alike on all ranks"):
        uneven(inputs(0, 0)[0])


class RowScaled(Coded):
    """A weight that crosses as int8, with one float32 scale for `rows` rows, and takes no part of such a block."""

    rows = 1

    def coded(self, data: Tensor) -> tuple[Tensor, ...]:
        assert data.ndim == 2, "whole rows come as rows"
        assert len(data) % self.rows == 0, f"{len(data)} rows"
        scales = scales_of(data, self.rows)
        return (data / scales.repeat_interleave(self.rows, 0)).round().to(torch.int8), scales

    def shown(self, codes: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        assert len(codes) == self.rows * len(scales)
        return codes * scales.repeat_interleave(self.rows, 0)


def scales_of(weight: Tensor, rows: int) -> Tensor:
    """(blocks, 1)."""
    return weight.view(-1, rows, weight.shape[1]).abs().amax((1, 2)).clamp(min=1e-12)[:, None] / 127


def rounded_by_rows(weight: Tensor, rows: int = 1) -> Tensor:
    scales = scales_of(weight, rows).repeat_interleave(rows, 0)
    return (weight / scales).round().to(torch.int8) * scales


class BlockScaled(RowScaled):
    """The same with blocks of four rows."""

    rows = 4


class BF16InChunks(Coded):
    """A weight that crosses in bfloat16, filled up to the equal chunks that FSDP2 gathers, as in torch's test."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], Any]:
        chunk = torch.full((math.ceil(outer_size[0] / mesh.size()), *outer_size[1:]), 77, dtype=torch.bfloat16)
        chunk[: self._data.size(0)].copy_(self._data)
        return (chunk,), "metadata"


def rounded_to_bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).to(weight.dtype)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(nodes=1),
        Scenario(nodes=3, options={"checks": Checks(interval=1)}),
        Scenario(local=2, cache="host", options=OFFLOADED),
    ],
    ids=["alone", "checked", "offloaded host"],
)
def test_elements_and_their_scales_are_gathered_together(scenario: Scenario) -> None:
    scenario = with_weights(RowScaled, rounded_by_rows, scenario, granularity=laconic.rows(1))
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    [packed] = [bucket for bucket in buckets(*runs[0].model.blocks) if bucket.form.is_packed]
    assert packed.form.dtype is torch.uint8
    num_bytes = sum(slot.numel + 4 * slot.shape[0] for slot in packed.layout.slots)
    assert num_bytes <= packed.form.packing.shard_nbytes * packed.cluster.size, "codes and scales"
    if scenario.cache != "none":
        pieces = sum(bucket.form.geometry.numel * bucket.form.dtype.itemsize for bucket in buckets(runs[0].model))
        assert runs[0].sent[1].weights == pieces, "each shard crosses once, with its scales"


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_a_conversion_gets_whole_blocks_of_the_granularity(nodes: int) -> None:
    """Three blocks of one matrix, and seven of the other, over two, three and five ranks."""
    scenario = Scenario(nodes=nodes, cache="host")
    scenario = with_weights(BlockScaled, partial(rounded_by_rows, rows=4), scenario, granularity=laconic.rows(4))
    scenario = replace(scenario, make=partial(Net, 1, 12, 28))
    assert_equals_oracle(scenario, scenario.run())


@on_ranks(3, local=1)
def test_the_memory_of_decoded_weights_is_counted() -> None:
    model: Any = shard(converting(small_net(), RowScaled), granularity=laconic.rows(1))
    [bucket] = [bucket for bucket in buckets(*model.blocks) if bucket.form.is_packed]
    decoded_bytes = sum(4 * slot.numel for slot in bucket.layout.slots)
    codes_bytes = sum(slot.numel + 4 * slot.shape[0] for slot in bucket.layout.slots)
    held = []
    for _ in range(2):
        model.blocks[0].unshard()
        assert bucket.form._conversions.nbytes == decoded_bytes + codes_bytes
        model.blocks[0].reshard()
        held.append(bucket.ledger.device_bytes)
    assert held[0] == held[1]


def test_conversions_that_fill_up_equal_chunks() -> None:
    scenario = with_weights(BF16InChunks, rounded_to_bf16, Scenario(nodes=4, cache="host"))
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    converted = [bucket for bucket in buckets(*runs[0].model.blocks) if bucket.form.dtype is torch.bfloat16]
    assert len(converted) == 2, "each has a bucket of its own, cut as FSDP2 cuts"
    for bucket in converted:
        (slot,) = bucket.layout.slots
        assert bucket.layout.shard_numel == math.ceil(slot.shape[0] / bucket.cluster.size) * slot.shape[1]


def test_equal_chunks_do_not_override_a_granularity() -> None:
    scenario = with_weights(BF16InChunks, rounded_to_bf16, Scenario(nodes=4), granularity=laconic.rows(4))
    with pytest.raises(RankError, match=r"granularity asks for blocks of \d+ elements of .*weight, but .*chunks"):
        scenario.run()


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
    """Take two steps. Returns the losses and the weights."""
    model: Any = build(lambda: nn.Sequential(nn.Linear(8, 10, bias=False), nn.ReLU(), nn.Linear(10, 8, bias=False)))
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(Twins(linear.weight.detach(), linear.weight.detach().clone()))
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for step in range(2):
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
    for options in ({}, {"cache": "host"}):
        torch.testing.assert_close(train_twins(laconic.fully_shard, **options), wanted)
    other = nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(Twins(torch.zeros(4, 4), torch.ones(4, 4)))
    with pytest.raises(NotImplementedError, match=r"a Twins .* consists of 2 tensors \(a, b\).* several equal ones"):
        laconic.fully_shard(other)


# -- methods on local tensors ------------------------------------------------------------------------------------------


def to_bf16(self: Tensor, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    """The second tensor has one element for each rank that has any."""
    assert outer_size == module.weight.shape
    return (self.to(torch.bfloat16), self.abs().amax(0, keepdim=True) if self.numel() else self.new_zeros(0)), None


@torch.no_grad()
def from_bf16(self: Tensor, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    tensor, largest = gathered
    torch.testing.assert_close(largest.max(), tensor.abs().max().float(), rtol=1e-2, atol=0)
    return decoded(tensor.to(dtype), (tensor,), out)


def patch(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.startswith("blocks") and name.endswith("weight"):
            local = parameter._local_tensor  # type: ignore[attr-defined]
            local.fsdp_pre_all_gather = to_bf16.__get__(local)
            local.fsdp_post_all_gather = from_bf16.__get__(local)
    return model


def test_methods_on_local_tensors_are_called() -> None:
    oracle_loss = rounded(rounded_to_bf16)
    scenario = Scenario(nodes=3, make=small_net, cache="host", events={0: patch}, oracle_loss=oracle_loss)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    packed = [bucket for bucket in buckets(*runs[0].model.blocks) if bucket.form.is_packed]
    assert len(packed) == 1, "weights in bf16, biases in fp32"


@on_ranks(2, local=1)
def test_methods_on_local_tensors_are_never_ignored() -> None:
    batch = inputs(0, 0)[0]
    late: Any = shard(build())
    late(batch)
    patch(late)
    with pytest.raises(RuntimeError, match=r"_local_tensor of .*weight.* after the first forward; put it there before"):
        late(batch)
    coded: Any = shard(build(), cache="host", wire=Wire(weights="int8"))
    patch(coded)
    with pytest.raises(NotImplementedError, match=r"cross as Wire\(weights='int8'\); use weights='exact'"):
        coded(batch)
    moved: Any = patch(shard(build()))
    moved(batch)
    moved.to(torch.float64)
    with pytest.raises(RuntimeError, match=r"whose memory has moved since.*put it on the new _local_tensor"):
        moved(batch.double())
