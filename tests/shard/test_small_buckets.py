"""Small trained buckets beside frozen ones: each rank holds them whole, and an outer unit takes them all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from tests.support.scenario import Scenario, adamw, assert_equals_oracle


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


def _trained_names(module: Any) -> list[str]:
    """The names of the trained parameters of the unit of `module`."""
    unit = unit_of(module)
    assert unit is not None
    return [slot.name for bucket in unit.buckets if not bucket.stored.is_frozen for slot in bucket.layout.slots]


def _norm(model: Any) -> tuple[Tensor, int]:
    """The norm of the trained parameters, and the bytes that it takes."""
    with sharded_net.moved(model) as sent:
        norm = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters() if p.requires_grad])
    return norm, sent.snapshot.total()


@pytest.mark.parametrize("cache", ["none", "rank"])
def test_adapters_of_all_blocks_train_whole_in_one_bucket(cache: Any) -> None:
    scenario = Scenario(local=2, make=AdaptedNet, cache=cache, micro_batches=2, optimizer=adamw)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    model, *others = (run.model for run in runs)
    for block in model.blocks:
        assert _trained_names(block) == []
        assert [bucket.stored.is_frozen for bucket in sharded_net.buckets(block)] == [True]
    assert _trained_names(model) == [f"blocks.{i}.{name}.weight" for i in range(3) for name in ("down", "up")]
    assert sum(not bucket.stored.is_frozen for bucket in unit_of(model).buckets) == 1  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.to_local().shape == (parameter.numel(),), "the parameter is whole"
            assert all(torch.equal(parameter.to_local(), other.get_parameter(name).to_local()) for other in others)
    apart = replace(scenario, options={"granularity": laconic.rows(1)}, steps=0).run()[0].model
    assert all(_trained_names(block) == ["down.weight", "up.weight"] for block in apart.blocks), "a granularity stays"
    assert list(model.state_dict()) == list(apart.state_dict())


@pytest.mark.parametrize("is_small", [True, False])
def test_nothing_but_adapters_moves(is_small: bool) -> None:
    """Small ones need one sum of gradients; the bucket of larger ones is gathered in each step, too."""
    make = partial(AdaptedNet, rank=3 if is_small else 16)
    run = Scenario(nodes=3, local=2, make=make, cache="rank", micro_batches=2, look=_norm).run()[0]
    assert is_small or all(_trained_names(block) for block in run.model.blocks), "more than an eighth of the unit"
    trained = [bucket for bucket in sharded_net.buckets(run.model) if not bucket.stored.is_frozen]
    levels: tuple[Level, ...] = ("node", "local")
    for level in levels:
        assert run.sent[1].sent(level, "weights") == (0 if is_small else sharded_net.gather_bytes(level, trained))
    for level in levels if is_small else levels[:1]:
        assert run.sent[1].sent(level, "gradients") == sharded_net.reduce_bytes(level, trained)
    norm, nbytes = run.looks[-1]
    assert norm > 0
    assert (nbytes == 0) == is_small, "each rank has all of the norm"


@on_ranks(2, local=1)
def test_what_stays_with_its_unit() -> None:
    mesh = laconic.init_mesh("cpu")
    width = 600
    assert 2 * 14 * width * 4 > _SMALL_BYTES > 2 * 13 * width * 4
    for rank, is_small in ((13, True), (14, False)):
        large: Any = sharded_net.shard(sharded_net.build(partial(AdaptedNet, width, rank)))
        assert (_trained_names(large.blocks[0]) == []) == is_small
    edited: Any = sharded_net.build(AdaptedNet)
    laconic.fully_shard(edited.blocks[0], mesh=mesh)
    laconic.fully_shard(edited.blocks[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    laconic.fully_shard(edited.blocks[2], mesh=mesh)
    with torch.no_grad():
        edited.blocks[2].up.weight.mul_(2)
    value = edited.blocks[2].up.weight.full_tensor()
    laconic.fully_shard(edited, mesh=mesh)
    names = [_trained_names(block) for block in edited.blocks]
    assert names == [[], ["down.weight", "up.weight"], ["down.weight", "up.weight"]]
    assert torch.equal(edited.blocks[2].up.weight.full_tensor(), value)
    alone: Any = sharded_net.build(AdaptedNet)
    laconic.fully_shard(alone.blocks[0], mesh=mesh)
    assert _trained_names(alone.blocks[0]) == ["down.weight", "up.weight"], "nobody is around it"
    alone.blocks[0](torch.randn(2, 67)).sum().backward()
    assert unit_of(alone.blocks[0]).buckets[1]._managed == []  # type: ignore[union-attr]


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
