"""Small trained buckets beside frozen ones: each rank holds them whole, and an outer unit takes them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic.comm.traffic import Level
from laconic.shard.api import _SMALL_BYTES
from laconic.shard.unit import unit_of
from tests.support import sharded_net
from tests.support.launch import on_ranks


class Adapted(nn.Module):
    """A frozen layer with an adapter of a low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedNet(nn.Module):
    """Adapted blocks between frozen ends."""

    def __init__(self, width: int = 67, rank: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Adapted(width, rank) for _ in range(3))
        self.out = nn.Linear(width, 3)
        for end in (self.inp, self.out):
            end.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _sharded(width: int = 67, rank: int = 3, **options: Any) -> Any:
    return sharded_net.shard(sharded_net.build(lambda: AdaptedNet(width, rank)), **options)


def _trained_names(module: Any) -> list[str]:
    """The names of the trained parameters of the unit of `module`."""
    unit = unit_of(module)
    assert unit is not None
    return [slot.name for bucket in unit.buckets if not bucket.is_frozen for slot in bucket.layout.slots]


def _train(model: Any, steps: int = 2) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            loss = sharded_net.squared_error(model, sharded_net.inputs(2 * step + number, dist.get_rank()))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    sharded_net.assert_nothing_gathered(model)
    return losses


@pytest.mark.parametrize("cache", ["none", "rank"])
@on_ranks(4, local=2)
def test_adapters_of_all_blocks_train_whole_in_one_bucket_as_if_cut(cache: Any) -> None:
    together, apart = _sharded(cache=cache), _sharded(cache=cache, granularity=laconic.rows(1))
    for block in together.blocks:
        assert _trained_names(block) == []
        assert [bucket.is_frozen for bucket in sharded_net.buckets(block)] == [True]
    assert _trained_names(together) == [f"blocks.{i}.{name}.weight" for i in range(3) for name in ("down", "up")]
    assert sum(not bucket.is_frozen for bucket in unit_of(together).buckets) == 1  # type: ignore[union-attr]
    assert all(_trained_names(block) == ["down.weight", "up.weight"] for block in apart.blocks), "a granularity stays"
    torch.testing.assert_close(torch.stack(_train(together)), torch.stack(_train(apart)), rtol=1e-6, atol=1e-6)
    assert list(together.state_dict()) == list(apart.state_dict())
    for name, value in sharded_net.full_parameters(together).items():
        torch.testing.assert_close(value, sharded_net.full_parameters(apart)[name], rtol=1e-5, atol=1e-6)
    for parameter in [p for p in together.parameters() if p.requires_grad]:
        assert parameter.to_local().shape == (parameter.numel(),), "the parameter is whole"
        _assert_equal_on_all_ranks(parameter.to_local())


def _assert_equal_on_all_ranks(value: Tensor) -> None:
    ends = torch.stack([value, -value])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    assert torch.equal(ends[0], -ends[1])


@pytest.mark.parametrize("is_small", [True, False])
@on_ranks(6, local=2)
def test_nothing_but_adapters_moves(is_small: bool) -> None:
    """Small ones need one sum of gradients; the bucket of larger ones is gathered in each step, too."""
    model = _sharded(rank=3 if is_small else 16, cache="rank")
    assert is_small or all(_trained_names(block) for block in model.blocks), "more than an eighth of the unit"
    _train(model, steps=1)
    trained = [bucket for bucket in sharded_net.buckets(model) if not bucket.is_frozen]
    with sharded_net.moved(model) as bytes_moved:
        _train(model, steps=1)
    levels: tuple[Level, ...] = ("node", "local")
    for level in levels:
        weights = 0 if is_small else sharded_net.gather_bytes(level, trained)
        assert bytes_moved.sent(level, "weights") == weights
    for level in levels if is_small else levels[:1]:
        assert bytes_moved.sent(level, "gradients") == sharded_net.reduce_bytes(level, trained)
    with sharded_net.moved(model) as bytes_moved:
        norm = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters() if p.requires_grad])
    assert norm > 0
    assert not is_small or bytes_moved.snapshot.total() == 0, "each rank has all of the norm"


@on_ranks(2, local=1)
def test_what_stays_with_its_unit() -> None:
    mesh = laconic.init_mesh("cpu")
    width = 600
    assert 2 * 14 * width * 4 > _SMALL_BYTES > 2 * 13 * width * 4
    for rank, is_small in ((13, True), (14, False)):
        large = _sharded(width, rank)
        assert (_trained_names(large.blocks[0]) == []) == is_small
    edited = sharded_net.build(AdaptedNet)
    laconic.fully_shard(edited.blocks[0], mesh=mesh)  # type: ignore[index]
    laconic.fully_shard(edited.blocks[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # type: ignore[index]
    laconic.fully_shard(edited.blocks[2], mesh=mesh)  # type: ignore[index]
    with torch.no_grad():
        edited.blocks[2].up.weight.mul_(2)  # type: ignore[index, union-attr]
    value = edited.blocks[2].up.weight.full_tensor()  # type: ignore[index, union-attr]
    laconic.fully_shard(edited, mesh=mesh)
    names = [_trained_names(block) for block in edited.blocks]  # type: ignore[union-attr]
    assert names == [[], ["down.weight", "up.weight"], ["down.weight", "up.weight"]]
    assert torch.equal(edited.blocks[2].up.weight.full_tensor(), value)  # type: ignore[index, union-attr]
    alone = sharded_net.build(AdaptedNet)
    laconic.fully_shard(alone.blocks[0], mesh=mesh)  # type: ignore[index]
    assert _trained_names(alone.blocks[0]) == ["down.weight", "up.weight"], "nobody is around it"  # type: ignore[index]
    alone.blocks[0](torch.randn(2, 67)).sum().backward()  # type: ignore[index]
    assert unit_of(alone.blocks[0]).buckets[1]._managed == []  # type: ignore[union-attr, index]


@on_ranks(2, local=1)
def test_an_optimizer_that_was_made_before_the_outer_call_is_told() -> None:
    mesh = laconic.init_mesh("cpu")
    model = sharded_net.build(AdaptedNet)
    for block in model.blocks:  # type: ignore[union-attr]
        laconic.fully_shard(block, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    laconic.fully_shard(model, mesh=mesh)
    sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match="replaced"):
        optimizer.step()
