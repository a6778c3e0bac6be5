"""Mixed precision: compute in few bits, sums in the dtype of sums, masters in fp32."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_equals_oracle, assert_same_bits
from tests.support.sharded_net import buckets, build, gather_bytes, set_divide_factors

BF16, FP32 = torch.bfloat16, torch.float32


def error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the loss of one rank of the oracle, with inputs cast as `cast_forward_inputs` casts them."""
    x, y = batch
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return (model(x.to(dtype)).float() - y).square().mean()


@pytest.mark.parametrize(
    ("nodes", "local", "cache", "reduce_dtype"),
    [(2, 2, "host", FP32), (3, 1, "none", None)],
)
def test_bf16_compute_trains_fp32_masters(nodes: int, local: int, cache: str, reduce_dtype: torch.dtype | None) -> None:
    """With fp32 masters and bf16 compute, accumulated over two micro-batches."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    scenario = Scenario(
        nodes=nodes, local=local, cache=cache, precision=policy, micro_batches=2, max_norm=1.0, keeps_gradients=True,
        own={"": {"mp_policy": replace(policy, output_dtype=FP32)}}, oracle_loss=error,
    )  # fmt: skip
    runs = scenario.run()
    assert_equals_oracle(scenario, runs, rtol=0.05, atol=4e-3)
    for run in runs:
        root, blocks, every = run.model._laconic_unit.buckets, buckets(run.model.blocks), buckets(run.model)
        wire = {"none": 4 * gather_bytes("node", blocks) + 2 * gather_bytes("node", root)}
        itemsize = (reduce_dtype or BF16).itemsize
        for sent in run.sent:
            assert sent.weights == wire.get(cache, gather_bytes("node", every))
            assert sent.gradients == (nodes - 1) * itemsize * sum(bucket.layout.shard_numel for bucket in every)
        assert all(value.dtype == FP32 for value in (*run.parameters.values(), *run.gradients[-1].values()))


class Weighted(nn.Module):
    """A module whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "total"),
    [
        (BF16, FP32, 257.0),
        (BF16, None, 256.0),  # 256 + 1 in bf16; the same rule on every torch release
        (None, BF16, 256.0),
    ],
)
@on_ranks(2, local=1)
def test_gradients_are_summed_in_the_reduce_dtype(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, total: float
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model: Any = laconic.fully_shard(Weighted(), mesh=laconic.init_mesh("cpu"), mp_policy=policy)
    set_divide_factors(model, 1.0)
    model(torch.full((4,), 256.0 if dist.get_rank() == 0 else 1.0)).backward()
    assert float(model.w.grad.full_tensor()[0]) == total


@pytest.mark.parametrize(
    "mesh", [{"nodes": 2, "local": 1}, {"nodes": 1, "local": 2}, {"islands": 2, "nodes": 1, "local": 1}], ids=str
)
@pytest.mark.parametrize("gradients", ["node", "rank"])
@pytest.mark.parametrize("reduce_dtype", [FP32, BF16, torch.float16], ids=str)
@on_ranks(2, local=1)
def test_micro_batches_are_summed_in_float32(reduce_dtype: torch.dtype, gradients: Any, mesh: dict[str, int]) -> None:
    """A sum is cast to the reduce dtype once, when it is sent on."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    cluster = laconic.init_mesh("cpu", **mesh)
    model: Any = laconic.fully_shard(
        Weighted(), mesh=cluster, mp_policy=policy, cache=laconic.Cache(gradients=gradients)
    )
    set_divide_factors(model, 1.0)
    first = min(2 / torch.finfo(reduce_dtype).eps, 2048.0)  # to which nothing adds 1 in few bits
    for step in range(2):
        for number in range(9):
            model.set_requires_all_reduce(number == 8)
            model.set_requires_gradient_sync(number >= (8 if step else 4))  # sums of an island wait, too
            model(torch.full((4,), first if number == 0 else 1.0)).backward()
        assert float(model.w.grad.full_tensor()[0]) == 2 * (first + 8), step
        model.zero_grad()


class Probe(nn.Module):
    """Returns the dtypes of its inputs, parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("table", torch.ones(5))

    def forward(self, x: Tensor, ids: Tensor, *, extra: dict[str, Any]) -> tuple[list[Any], Tensor]:
        seen = [each.dtype for each in (x, ids, extra["e"], self.linear.weight, self.table)]
        return seen, self.linear(x.to(self.linear.weight.dtype))


@on_ranks(2, local=1)
def test_only_floating_point_inputs_and_parameters_are_cast() -> None:
    """Buffers and integers stay."""
    ids, mesh = torch.ones(2, dtype=torch.long), laconic.init_mesh("cpu")
    for options, inputs, weight, output in (
        ({}, FP32, FP32, FP32),
        ({"param_dtype": BF16}, BF16, BF16, BF16),
        ({"param_dtype": BF16, "output_dtype": FP32}, BF16, BF16, FP32),
        ({"param_dtype": BF16, "cast_forward_inputs": False}, FP32, BF16, BF16),
    ):
        policy = MixedPrecisionPolicy(**options)  # type: ignore[arg-type]
        model: Any = laconic.fully_shard(Probe(), mesh=mesh, mp_policy=policy)
        seen, y = model(torch.ones(2, 5), ids, extra=OrderedDict(e=torch.ones(1), name="text"))
        assert [*seen, y.dtype] == [inputs, torch.long, inputs, weight, FP32, output]
        y.sum().backward()
        assert model.linear.weight.dtype == model.linear.weight.grad.dtype == FP32


class Mixed(nn.Module):
    """A frozen bf16 base, fp32 and fp64 parameters that train, and a frozen table of integers, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, dtype=BF16).requires_grad_(False)
        self.adapter = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        self.table = nn.Parameter(torch.randint(0, 100, (7, 3)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x.to(BF16)).float() + self.adapter(x)
        return y * self.scale.sum().float() + self.table.sum()


@pytest.mark.parametrize("cache", ["host", "rank"])
@on_ranks(2, local=1)
def test_a_unit_may_mix_dtypes(cache: str) -> None:
    plain = build(Mixed)
    model: Any = laconic.fully_shard(build(Mixed), mesh=laconic.init_mesh("cpu"), cache=cache)
    assert sorted(str(bucket.dtype) for bucket in buckets(model)) == [
        "torch.bfloat16", "torch.float32", "torch.float64", "torch.int64",
    ]  # fmt: skip
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for net in (plain, model):
            net(x).square().mean().backward()
            torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-6).step()
    for name, parameter in plain.named_parameters():
        got = model.get_parameter(name)
        assert got.dtype == parameter.dtype
        torch.testing.assert_close(got.full_tensor(), parameter.detach(), msg=name)
        if parameter.requires_grad:
            torch.testing.assert_close(got.grad.full_tensor(), parameter.grad, msg=name)
    torch.testing.assert_close(model(x), plain(x))
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = laconic.fully_shard(build(Mixed), mesh=laconic.init_mesh("cpu"), mp_policy=policy)
    model.unshard()
    assert torch.equal(model.table, plain.table), "integers are never cast"
    assert model.adapter.weight.dtype == BF16


def test_an_empty_policy_changes_no_bit() -> None:
    policies = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32, output_dtype=FP32))
    plain, *others = (Scenario(precision=policy).run()[0] for policy in (None, *policies))
    for other in others:
        assert_same_bits(plain, other)
