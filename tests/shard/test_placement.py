"""`cache="rank"`: whole weights that stay on each rank train to the bits of others, and cross when they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from laconic.shard.policies import ShardPolicy
from tests.support import sharded_net
from tests.support.launch import on_ranks

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _frozen_net(*frozen: int) -> nn.Module:
    model: Any = sharded_net.build()
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    return model


def _trained(steps: int = 3, frozen: tuple[int, ...] = (), **options: Any) -> tuple[Any, list[float]]:
    """Train with two micro-batches a step, an evaluation, and an edit. Returns the model and all losses."""
    model = sharded_net.shard(_frozen_net(*frozen), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            loss = sharded_net.squared_error(model, sharded_net.inputs(2 * step + number, dist.get_rank()))
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(sharded_net.squared_error(model, sharded_net.inputs(99, dist.get_rank()))))
            if step == 1:
                next(iter(model.parameters())).mul_(0.5)
        sharded_net.assert_nothing_gathered(model)
    return model, losses


def _assert_equal(options: dict[str, Any], other: dict[str, Any]) -> None:
    (model, losses), (expected_model, expected) = _trained(**options), _trained(**other)
    assert losses == expected
    for name, whole in sharded_net.full_parameters(model).items():
        assert torch.equal(whole, sharded_net.full_parameters(expected_model)[name]), name


@pytest.mark.heavy
@on_ranks(6, local=2)
def test_whole_weights_train_to_the_bits_of_gathered_ones() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"frozen": (0, 2)}, {"mp_policy": _BF16}, {"mp_policy": _BF16, "frozen": (1,)},
        {"offload_policy": CPUOffloadPolicy()}, {"reshard_after_forward": False},
        {"checks": laconic.Checks(interval=1, on_damage="regather", unnoticed_edits=True)},
    ]  # fmt: skip
    for change in changes:
        _assert_equal({"cache": "rank", **change}, {"cache": "none", **change})


@on_ranks(3, local=3)
def test_on_one_node_as_well() -> None:
    _assert_equal({"cache": "rank"}, {"cache": "none"})


@pytest.mark.heavy
@on_ranks(4, local=2)
def test_the_base_of_a_difference_is_in_the_whole_buffer() -> None:
    for wire in ("4bit", "8bit", laconic.Wire(weights="int8", as_values=True)):
        _assert_equal({"cache": "rank", "wire": wire}, {"cache": "device", "wire": wire})


@on_ranks(4, local=2)
def test_weights_are_gathered_once_a_step_and_frozen_ones_once_in_a_run() -> None:
    model = sharded_net.shard(_frozen_net(1), cache="rank")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = [bucket for bucket in sharded_net.buckets(model) if not bucket.is_frozen]
    for step in range(3):
        for number in range(2):
            batch = sharded_net.inputs(2 * step + number, dist.get_rank())
            model.set_requires_gradient_sync(number == 1)
            with sharded_net.moved(model) as forward:
                loss = sharded_net.squared_error(model, batch)
            which = [] if number else sharded_net.buckets(model) if step == 0 else trained
            for level in ("node", "local"):
                assert forward.sent(level, "weights") == sharded_net.gather_bytes(level, which)
            with sharded_net.moved(model) as backward:
                loss.backward()
            assert backward.sent("node", "weights") == backward.sent("local", "weights") == 0
        optimizer.step()
        optimizer.zero_grad()
    assert model.memory().device_bytes == sharded_net.held_bytes(model)
    whole = sum(bucket.form.numel * bucket.layout.num_shards * 4 for bucket in sharded_net.buckets(model))
    kept = sum(bucket.shard.nbytes for bucket in trained)
    assert sharded_net.held_bytes(model) == whole + kept, "a frozen shard lies in the whole buffer"


@on_ranks(4, local=2)
def test_units_may_rest_in_different_places() -> None:
    model = sharded_net.build()
    mesh = laconic.init_mesh("cpu")
    for block, cache in zip(model.blocks, ("rank", "host", "none"), strict=True):  # type: ignore[call-overload]
        laconic.fully_shard(block, mesh=mesh, cache=cache)
    laconic.fully_shard(model, mesh=mesh, cache="rank")
    same = sharded_net.shard(sharded_net.build())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, same)]
    for seed in range(3):
        assert torch.equal(
            sharded_net.train_step(model, optimizers[0], seed), sharded_net.train_step(same, optimizers[1], seed)
        )


@on_ranks(4, local=2)
def test_a_run_goes_on_with_another_placement() -> None:
    model, _ = _trained(cache="rank")
    other = sharded_net.shard(sharded_net.build(seed=1), cache="host")
    other.load_state_dict(model.state_dict())
    back = sharded_net.shard(sharded_net.build(seed=2), cache="rank")
    sharded_net.train_step(back)  # what it has gathered is stale after the load
    back.load_state_dict(other.state_dict())
    batch = sharded_net.inputs(5, dist.get_rank())
    losses = [float(sharded_net.squared_error(each, batch)) for each in (model, other, back)]
    assert len(set(losses)) == 1


def test_what_contradicts_whole_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="until='backward'"):
        laconic.Cache(where="rank", until="backward")
    with pytest.raises(ValueError, match=r"cache='rank'\} keeps them|cache='rank' keeps them"):
        ShardPolicy(cache=laconic.Cache(where="rank"), reshard_after_forward=True)


@on_ranks(1)
def test_freeing_what_stays_is_refused() -> None:
    with pytest.raises(ValueError, match="cache='rank' keeps them; leave it out"):
        laconic.fully_shard(nn.Linear(3, 3), cache="rank", reshard_after_forward=True)
