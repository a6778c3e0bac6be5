"""`Cache(gradients="rank")`: gradients wait whole and are summed once a step: [Note: Gradients that wait whole].

The sums have another order than those of `gradients="node"`: over micro-batches first, then over ranks. Where sums are
exact, as those of small integers are, both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic import Cache
from tests.shard.test_reduce import Line, Router, integer_batch, routed_error
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, adamw, assert_equals_oracle
from tests.support.sharded_net import (
    Moved,
    Net,
    accumulate,
    assert_gradients,
    assert_nothing_gathered,
    buckets,
    build,
    full_gradients,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    reduce_bytes,
    shard,
    squared_error,
)

WHOLE = Cache(gradients="rank")


def _whole_bytes(model: Any) -> int:
    """The bytes of all gradients, whole."""
    trained = [bucket for bucket in buckets(model) if not bucket.is_frozen]
    return sum(bucket.layout.numel * bucket.reduce_dtype.itemsize for bucket in trained)


def _shard_bytes(model: Any) -> int:
    return sum(bucket.shard.nbytes for bucket in buckets(model))


def _backward(model: Any, batch: Any, *, syncs: bool, loss: Any = squared_error) -> Moved:
    """One micro-batch. Returns the bytes of its backward; one that does not sync sends no gradients."""
    model.set_requires_gradient_sync(syncs)
    value = loss(model, batch[dist.get_rank()])
    with moved(model) as bytes_moved:
        value.backward()
    if not syncs:
        for level in ("node", "local", "island"):
            assert bytes_moved.sent(level, "gradients") == 0
    return bytes_moved


# -- bits, bytes and memory --------------------------------------------------------------------------------------------


def _partly_frozen() -> nn.Module:
    net = Net()
    net.blocks[1].requires_grad_(False)
    return net


@pytest.mark.parametrize(("world_size", "local"), [(3, 1), (4, 2)])
@on_ranks("world_size", local="local")
def test_gradients_cross_once_a_step_inside_the_node_too() -> None:
    """Two steps of three micro-batches. In between a rank holds whole gradients, and afterwards nothing more."""
    model = shard(build(_partly_frozen), cache=WHOLE)
    oracle, shards = oracle_of(model, _partly_frozen), _shard_bytes(model)
    trained = [bucket for bucket in buckets(model) if not bucket.is_frozen]
    for seed in range(2):
        batches = micro_batches(3, seed)
        for number, batch in enumerate(batches):
            sent = _backward(model, batch, syncs=number == 2)
            if number == 2:
                for level in ("node", "local"):
                    assert sent.sent(level, "gradients") == reduce_bytes(level, trained)
            else:
                assert model.memory().device_bytes == shards + _whole_bytes(model)
                assert not any(each.grad.has_memory for each in model.parameters() if each.requires_grad)
            assert_nothing_gathered(model)
        kept = sum(bucket.shard.nbytes for bucket in trained)
        assert model.memory().device_bytes == shards + kept, "the shards and their gradients"
        assert_gradients(model, oracle, batches)
        assert all(parameter.grad is None for parameter in model.blocks[1].parameters())
        model.zero_grad()
        assert model.memory().device_bytes == shards


def _sum_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).sum()


@pytest.mark.parametrize(("world_size", "local", "where"), [(4, 2, "host"), (2, 2, "rank")])
@on_ranks("world_size", local="local")
def test_gradients_of_integers_are_exact_wherever_weights_rest(where: Any) -> None:
    """Also if a micro-batch between others syncs: `.grad` then has a part, and the rest waits."""
    for pattern in ((False, False, True), (False, True, False, True)):
        numbers, ranks = range(len(pattern)), range(dist.get_world_size())
        batches = [[integer_batch(number, rank) for rank in ranks] for number in numbers]
        found = []
        for gradients in ("rank", "node"):
            model = shard(build(Line), cache=Cache(where=where, gradients=gradients))  # type: ignore[arg-type]
            for batch, syncs in zip(batches, pattern, strict=True):
                model.set_requires_gradient_sync(syncs)
                _sum_of(model, batch[dist.get_rank()]).backward()
            found.append(full_gradients(model))
            is_divided_once = pattern.count(True) == 1  # else the parts round, which are added to `.grad`
            exactly = {"rtol": 0, "atol": 0} if is_divided_once else {}
            assert_gradients(model, oracle_of(model, Line, _sum_of), batches, **exactly)
        assert all(torch.equal(found[0][name], value) for name, value in found[1].items()), pattern


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float64], ids=str)
@on_ranks(2, local=1)
def test_gradients_wait_in_the_dtype_of_sums(reduce_dtype: torch.dtype) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, batches = shard(build(), cache=WHOLE, mp_policy=precision), micro_batches(2)
    _backward(model, batches[0], syncs=False)
    numel = sum(bucket.layout.numel for bucket in buckets(model))
    assert model.memory().device_bytes == _shard_bytes(model) + numel * reduce_dtype.itemsize


@on_ranks(4, local=1)
def test_replicas_sum_once_a_step_as_well() -> None:
    """Two islands of two ranks; then with a backward in between whose sums wait for the other island."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=2)
    model = shard(build(), cache=WHOLE, mesh=mesh)
    oracle, batches = oracle_of(model), micro_batches(3)
    oracle.num_nodes, oracle.num_local = 2, 2
    with moved(model) as bytes_moved:
        accumulate(model, batches)
    assert bytes_moved.sent("island", "gradients") == _shard_bytes(model)
    assert_gradients(model, oracle, batches)
    model.zero_grad()
    for number, batch in enumerate(batches):
        model.set_requires_all_reduce(number == 2)
        _backward(model, batch, syncs=number > 0)
    assert_gradients(model, oracle, batches)


# -- which micro-batches use what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("skips", [(0, 1), (1, 2)])
@on_ranks(4, local=2)
def test_a_unit_that_some_micro_batches_skip(skips: tuple[int, ...]) -> None:
    """If the last micro-batch does not use a unit, its waiting gradients are summed at the end."""
    model = shard(build(), cache=WHOLE)

    def loss(net: Any, batch: Any) -> Tensor:
        number, (x, y) = batch
        x = net.inp(x)
        for index, block in enumerate(net.blocks):
            x = x if index == 2 and number in skips else block(x)
        return (net.out(x) - y).square().mean()

    numbered = [[(number, each) for each in batch] for number, batch in enumerate(micro_batches(3))]
    model.forward = lambda batch: loss(model, batch)
    with moved(model) as bytes_moved:
        accumulate(model, numbered, lambda net, batch: net(batch))
    for level in ("node", "local"):
        assert bytes_moved.sent(level, "gradients") == reduce_bytes(level, buckets(model))
    assert_gradients(model, oracle_of(model, loss=loss), numbered)


@on_ranks(3, local=1)
def test_a_parameter_that_one_rank_uses_in_the_first_micro_batch_only() -> None:
    model = shard(build(Router), cache=WHOLE)
    oracle = oracle_of(model, Router, routed_error)
    for chosen in [({0}, set()), ({1, 2}, {0}), (set(), {2}), (set(), set())]:
        batches = [[(inputs(number, rank)[0], rank in some) for rank in range(3)] for number, some in enumerate(chosen)]
        model.zero_grad()
        accumulate(model, batches, routed_error)
        if any(chosen):
            assert_gradients(model, oracle, batches)
    assert all(block.sometimes.weight.grad is None for block in model.blocks), "no rank has used it"
    assert all(block.always.weight.grad is not None for block in model.blocks)


def _clear_none(parameter: Any) -> None:
    parameter.grad = None


def _clear_zero(parameter: Any) -> None:
    parameter.grad.zero_()


@pytest.mark.parametrize("clear", [_clear_none, _clear_zero])
@on_ranks(4, local=2)
def test_what_is_cleared_between_micro_batches_is_cleared(clear: Callable[[Any], None]) -> None:
    model = shard(build(), cache=WHOLE)
    oracle, names, batches = oracle_of(model), ("blocks.1.up.weight", "out.bias"), micro_batches(2)
    _backward(model, batches[0], syncs=False)
    for name in names:
        clear(model.get_parameter(name))
    _backward(model, batches[1], syncs=True)
    got, (_, both), (_, last) = full_gradients(model), oracle.gradients(batches), oracle.gradients(batches[1:])
    for name, value in both.items():
        torch.testing.assert_close(got[name], last[name] if name in names else value, msg=name)
    model.zero_grad()
    # All is cleared, and one block is used by nobody afterwards: it has no gradient rather than zeros.
    shards = model.memory().device_bytes
    _backward(model, batches[0], syncs=False)
    for parameter in model.parameters():
        clear(parameter)
    skipped, model.blocks[2] = model.blocks[2], nn.Identity()
    _backward(model, batches[1], syncs=True)
    model.blocks[2] = skipped
    assert all(parameter.grad is not None for parameter in model.blocks[1].parameters())
    cleared = [parameter.grad for parameter in model.blocks[2].parameters()]
    assert all(each is None or not each.full_tensor().any() for each in cleared)
    assert clear is _clear_zero or cleared == [None] * 4
    model.zero_grad()
    assert model.memory().device_bytes == shards


@on_ranks(3, local=3)
def test_one_rank_may_clear_alone() -> None:
    """Its own part is dropped, and no rank waits for another."""
    model = shard(build(), cache=WHOLE)
    oracle, batches = oracle_of(model), micro_batches(2)
    _backward(model, batches[0], syncs=False)
    if dist.get_rank() == 1:
        model.zero_grad()
    _backward(model, batches[1], syncs=True)
    got, (_, last) = full_gradients(model), oracle.gradients(batches[1:])
    worker = oracle.worker()
    first = [oracle.one_rank(worker, batches[0][each])[1] for each in (0, 2)]
    for name, value in last.items():
        torch.testing.assert_close(got[name], value + sum(each[name] for each in first) / 3, msg=name)


@on_ranks(4, local=2)
def test_what_is_frozen_after_the_first_micro_batch_keeps_its_gradient() -> None:
    """A parameter, and a unit. Where it is cleared, too, it has none: `.grad` stands for what waits."""
    model = shard(build(), cache=WHOLE)
    oracle, batches, cleared = oracle_of(model), micro_batches(3), "blocks.0.up.weight"
    _backward(model, batches[0], syncs=False)
    frozen = {name for name, _ in model.named_parameters() if name.startswith(("blocks.1.up.weight", "blocks.2"))}
    for name in (*frozen, cleared):
        model.get_parameter(name).requires_grad_(False)
    _backward(model, batches[1], syncs=False)
    assert model.get_parameter(cleared).grad is not None
    model.get_parameter(cleared).grad = None
    _backward(model, batches[2], syncs=True)
    got, (_, all_three), (_, first) = full_gradients(model), oracle.gradients(batches), oracle.gradients(batches[:1])
    assert got.keys() == all_three.keys() - {cleared}
    for name, value in got.items():
        torch.testing.assert_close(value, first[name] if name in frozen else all_three[name], msg=name)


# -- disturbances ------------------------------------------------------------------------------------------------------


@on_ranks(3, local=3)
def test_an_audit_between_micro_batches_disturbs_nothing() -> None:
    found = []
    for audits in (False, True):
        model, batches = shard(build(), cache=WHOLE), micro_batches(2)
        _backward(model, batches[0], syncs=False)
        if audits:
            held = model.memory().device_bytes
            with moved(model) as bytes_moved:
                laconic.audit(model, inputs(77, dist.get_rank()), squared_error)
            assert bytes_moved.snapshot.total(purpose="gradients") == 0
            assert model.memory().device_bytes == held
        _backward(model, batches[1], syncs=True)
        found.append(full_gradients(model))
    assert_gradients(model, oracle_of(model), batches)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("syncs", [False, True])
@on_ranks(4, local=2)
def test_an_exception_in_the_second_backward_drops_what_waits(syncs: bool) -> None:
    """By `reset_iter_state`, or by the next forward."""
    model = shard(build(), cache=WHOLE)
    oracle, batches, held = oracle_of(model), micro_batches(4), model.memory().device_bytes
    for resets in (True, False):
        _backward(model, batches[0], syncs=False)
        handle = model.blocks[0].register_forward_hook(lambda module, args, output: Breaks.apply(output))
        with pytest.raises(ZeroDivisionError):
            _backward(model, batches[1], syncs=syncs)
        handle.remove()
        if resets:
            model.reset_iter_state()
        if syncs:
            model.zero_grad()  # what is in `.grad` already stays, as under DDP
        if resets:
            assert model.memory().device_bytes == held
        accumulate(model, batches[2:])
        assert_gradients(model, oracle, batches[2:])
        model.zero_grad()


@on_ranks(4, local=2)
def test_units_may_let_gradients_wait_in_different_forms_and_sync_at_different_times() -> None:
    forms = {"blocks.0": WHOLE, "blocks.1": Cache(where="host"), "blocks.2": Cache(where="rank", gradients="rank")}
    model = Scenario(cache=WHOLE, own={name: {"cache": cache} for name, cache in forms.items()}).sharded()
    batches = micro_batches(3)
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == 2)
        model.blocks[0].set_requires_gradient_sync(number > 0)
        squared_error(model, batch[dist.get_rank()]).backward()
    assert_gradients(model, oracle_of(model), batches)


def test_training_equals_the_oracle() -> None:
    cache = Cache(where="device", gradients="rank")
    scenario = Scenario(nodes=1, local=3, cache=cache, micro_batches=3, max_norm=0.5, optimizer=adamw)
    assert_equals_oracle(scenario, scenario.run(), rtol=1e-4, atol=1e-5)
