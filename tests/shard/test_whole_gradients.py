"""`Cache(gradients="rank")`: gradients wait whole and are summed once a step: [Note: Gradients that wait whole].

The sums have another order than those of `gradients="node"`: over micro-batches first, then over ranks. Where sums are
exact, as those of small integers are, both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic import Cache
from tests.shard.test_reduce import Line, Router, integer_batch, routed_error
from tests.support import sharded_net
from tests.support.launch import on_ranks
from tests.support.sharded_net import assert_gradients, buckets, full_gradients, moved, reduce_bytes

WHOLE = Cache(gradients="rank")
MESHES = [(1, 1), (3, 1), (3, 3), (4, 2), (6, 2)]
"""(ranks, local ranks)."""
Pattern = tuple[bool, ...]
"""Whether each micro-batch of a step syncs."""


def _whole_bytes(model: Any) -> int:
    """The bytes of all gradients, whole."""
    trained = [bucket for bucket in buckets(model) if not bucket.is_frozen]
    return sum(bucket.layout.numel * bucket.reduce_dtype.itemsize for bucket in trained)


def _backward(model: Any, loss: Any, batch: Any, *, syncs: bool, waits_whole: bool = True) -> sharded_net.Moved:
    """One micro-batch. Returns the bytes of its backward; one that does not sync sends no gradients that wait whole."""
    model.set_requires_gradient_sync(syncs)
    value = loss(model, batch)
    with moved(model) as bytes_moved:
        value.backward()
    if waits_whole and not syncs:
        for level in ("node", "local", "island"):
            assert bytes_moved.sent(level, "gradients") == 0
    return bytes_moved


def _accumulate(model: Any, batches: sharded_net.Batches, loss: Any = sharded_net.squared_error) -> None:
    """One step's backwards, of which the last one syncs."""
    for number, batch in enumerate(batches):
        _backward(model, loss, batch[dist.get_rank()], syncs=number == len(batches) - 1)


# -- bits, bytes and memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "local"), MESHES)
@on_ranks("world_size", local="local")
def test_gradients_cross_once_a_step_inside_the_node_too() -> None:
    """Two steps of three micro-batches. In between a rank holds whole gradients, and afterwards nothing more."""
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    oracle = sharded_net.oracle_of(model)
    shards = sum(bucket.shard.nbytes for bucket in buckets(model))
    for seed in range(2):
        batches = sharded_net.micro_batches(3, seed)
        for number, batch in enumerate(batches):
            syncs = number == 2
            sent = _backward(model, sharded_net.squared_error, batch[dist.get_rank()], syncs=syncs)
            if syncs:
                for level in ("node", "local"):
                    assert sent.sent(level, "gradients") == reduce_bytes(level, buckets(model))
            else:
                assert model.memory().device_bytes == shards + _whole_bytes(model)
                assert not any(parameter.grad.has_memory for parameter in model.parameters())
            sharded_net.assert_nothing_gathered(model)
        assert model.memory().device_bytes == 2 * shards, "the shards and their gradients"
        assert_gradients(model, oracle, batches)
        model.zero_grad()
        assert model.memory().device_bytes == shards


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).sum()


def _line_gradients(pattern: Pattern, cache: Cache) -> tuple[Any, dict[str, Tensor], Any]:
    """The gradients of a model of small integers. Returns the model, them, and the batches."""
    model = sharded_net.shard(sharded_net.build(Line), cache=cache)
    batches = [[integer_batch(number, rank) for rank in range(dist.get_world_size())] for number in range(len(pattern))]
    for batch, syncs in zip(batches, pattern, strict=True):
        _backward(model, _loss, batch[dist.get_rank()], syncs=syncs, waits_whole=cache.gradients == "rank")
    return model, full_gradients(model), batches


@pytest.mark.heavy
@pytest.mark.parametrize(("world_size", "local"), MESHES)
@on_ranks("world_size", local="local")
def test_gradients_of_integers_are_exact_wherever_weights_rest() -> None:
    """Also if a micro-batch between others syncs: `.grad` then has a part, and the rest waits."""
    patterns: list[Pattern] = [(False, False, True), (False, True, False, True)]
    for where in ("none", "host", "device", "rank"):
        for pattern in patterns:
            cache = Cache(where=where, gradients="rank")
            model, got, batches = _line_gradients(pattern, cache)
            oracle = sharded_net.oracle_of(model, Line, _loss)
            is_divided_once = pattern.count(True) == 1  # else the parts round, which are added to `.grad`
            assert_gradients(model, oracle, batches, **({"rtol": 0, "atol": 0} if is_divided_once else {}))
            _, others, _ = _line_gradients(pattern, replace(cache, gradients="node"))
            assert all(torch.equal(got[name], value) for name, value in others.items()), (where, pattern)


class Small(Line):
    """Lines whose gradients stay small: weights of zeros and ones."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.eye(*parameter.shape))


def _wait_in(reduce_dtype: torch.dtype) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = sharded_net.shard(sharded_net.build(Small), cache=WHOLE, mp_policy=precision)
    batches = [[integer_batch(number, rank).abs().bfloat16() for rank in range(4)] for number in range(3)]
    shards = sum(bucket.shard.nbytes for bucket in buckets(model))
    for number, batch in enumerate(batches):
        _backward(model, _loss, batch[dist.get_rank()], syncs=number == 2)
        if number < 2:
            whole = sum(bucket.layout.numel for bucket in buckets(model)) * reduce_dtype.itemsize
            assert model.memory().device_bytes == shards + whole
    oracle = sharded_net.oracle_of(model, Small, _loss)
    oracle.param_dtype, oracle.reduce_dtype = torch.bfloat16, reduce_dtype
    assert_gradients(model, oracle, batches, rtol=0, atol=0)


@on_ranks(4, local=2)
def test_gradients_wait_in_the_dtype_of_sums() -> None:
    """Integers up to 256 are exact in bfloat16."""
    for reduce_dtype in (torch.bfloat16, torch.float32, torch.float64):
        _wait_in(reduce_dtype)


@on_ranks(4, local=2)
def test_frozen_buckets_take_no_memory_for_gradients() -> None:
    net: Any = sharded_net.build()
    net.blocks[1].requires_grad_(False)
    model = sharded_net.shard(net, cache=WHOLE)
    shards = sum(bucket.shard.nbytes for bucket in buckets(model))
    batches = sharded_net.micro_batches(2)
    _backward(model, sharded_net.squared_error, batches[0][dist.get_rank()], syncs=False)
    assert model.memory().device_bytes == shards + _whole_bytes(model)
    _backward(model, sharded_net.squared_error, batches[1][dist.get_rank()], syncs=True)
    oracle = sharded_net.oracle_of(model)
    oracle.model.blocks[1].requires_grad_(False)  # type: ignore[index]
    assert_gradients(model, oracle, batches)
    assert all(parameter.grad is None for parameter in model.blocks[1].parameters())


@on_ranks(4, local=1)
def test_replicas_sum_once_a_step_as_well() -> None:
    """Two islands of two ranks; then with a backward in between whose sums wait for the other island."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=2)
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE, mesh=mesh)
    oracle = sharded_net.oracle_of(model)
    oracle.num_nodes, oracle.num_local = 2, 2
    batches = sharded_net.micro_batches(3)
    with moved(model) as bytes_moved:
        _accumulate(model, batches)
    assert bytes_moved.sent("island", "gradients") == sum(bucket.shard.nbytes for bucket in buckets(model))
    assert_gradients(model, oracle, batches)
    model.zero_grad()
    for number, batch in enumerate(batches):
        model.set_requires_all_reduce(number == 2)
        _backward(model, sharded_net.squared_error, batch[dist.get_rank()], syncs=number > 0)
    assert_gradients(model, oracle, batches)


# -- which micro-batches use what --------------------------------------------------------------------------------------


def _skip(skips: tuple[int, ...]) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    batches = sharded_net.micro_batches(3)

    def loss(net: Any, batch: Any) -> Tensor:
        number, (x, y) = batch
        x = net.inp(x)
        for index, block in enumerate(net.blocks):
            x = x if index == 2 and number in skips else block(x)
        return (net.out(x) - y).square().mean()

    numbered: Any = [[(number, each) for each in batch] for number, batch in enumerate(batches)]
    model.forward = lambda batch: loss(model, batch)
    with moved(model) as bytes_moved:
        _accumulate(model, numbered, lambda net, batch: net(batch))
    for level in ("node", "local"):
        assert bytes_moved.sent(level, "gradients") == reduce_bytes(level, buckets(model))
    assert_gradients(model, sharded_net.oracle_of(model, loss=loss), numbered)


@on_ranks(4, local=2)
def test_a_unit_that_some_micro_batches_skip() -> None:
    """If the last micro-batch does not use a unit, its waiting gradients are summed at the end."""
    for skips in ((1,), (0,), (0, 1), (1, 2), (2,)):
        _skip(skips)


@on_ranks(4, local=2)
def test_a_parameter_that_one_rank_uses_in_the_first_micro_batch_only() -> None:
    model = sharded_net.shard(sharded_net.build(Router), cache=WHOLE)
    oracle = sharded_net.oracle_of(model, Router, routed_error)
    rank = dist.get_rank()
    for chosen in [({0}, set()), ({1, 3}, {2}), (set(), {3}), ({0, 1, 2, 3}, set())]:
        batches: Any = [
            [(sharded_net.inputs(number, each)[0], each in some) for each in range(4)]
            for number, some in enumerate(chosen)
        ]
        _accumulate(model, batches, routed_error)
        assert_gradients(model, oracle, batches)
        model.zero_grad()
    none = [[(sharded_net.inputs(0, each)[0], False) for each in range(4)] for _ in range(2)]
    _backward(model, routed_error, none[0][rank], syncs=False)
    _backward(model, routed_error, none[1][rank], syncs=True)
    assert all(block.sometimes.weight.grad is None for block in model.blocks), "no rank has used it"
    assert all(block.always.weight.grad is not None for block in model.blocks)


def _clear_none(parameter: Any) -> None:
    parameter.grad = None


def _clear_zero(parameter: Any) -> None:
    parameter.grad.zero_()


def _clear(clear: Callable[[Any], None]) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    oracle, rank, names = sharded_net.oracle_of(model), dist.get_rank(), ("blocks.1.up.weight", "out.bias")
    batches = sharded_net.micro_batches(3)
    _backward(model, sharded_net.squared_error, batches[0][rank], syncs=False)
    for name in names:
        clear(model.get_parameter(name))
    _backward(model, sharded_net.squared_error, batches[1][rank], syncs=False)
    _backward(model, sharded_net.squared_error, batches[2][rank], syncs=True)
    got, (_, all_three), (_, last_two) = full_gradients(model), oracle.gradients(batches), oracle.gradients(batches[1:])
    for name, value in all_three.items():
        torch.testing.assert_close(got[name], last_two[name] if name in names else value, msg=name)
    model.zero_grad()
    # All is cleared, and one block is used by nobody afterwards: it has no gradient rather than zeros.
    shards = model.memory().device_bytes
    _backward(model, sharded_net.squared_error, batches[0][rank], syncs=False)
    for parameter in model.parameters():
        clear(parameter)
    model.set_requires_gradient_sync(True)
    skipped, model.blocks[2] = model.blocks[2], nn.Identity()
    sharded_net.squared_error(model, batches[1][rank]).backward()
    model.blocks[2] = skipped
    assert all(parameter.grad is not None for parameter in model.blocks[1].parameters())
    cleared = [parameter.grad for parameter in model.blocks[2].parameters()]
    assert all(each is None or not each.full_tensor().any() for each in cleared)
    assert clear is _clear_zero or cleared == [None] * 4
    model.zero_grad()
    assert model.memory().device_bytes == shards


@on_ranks(6, local=2)
def test_what_is_cleared_between_micro_batches_is_cleared() -> None:
    for clear in (_clear_none, _clear_zero):
        _clear(clear)


@on_ranks(4, local=2)
def test_one_rank_may_clear_alone() -> None:
    """Its own part is dropped, and no rank waits for another."""
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    oracle, rank, batches = sharded_net.oracle_of(model), dist.get_rank(), sharded_net.micro_batches(2)
    _backward(model, sharded_net.squared_error, batches[0][rank], syncs=False)
    if rank == 1:
        model.zero_grad()
    _backward(model, sharded_net.squared_error, batches[1][rank], syncs=True)
    got, (_, last) = full_gradients(model), oracle.gradients(batches[1:])
    worker = oracle.worker()
    first = [oracle.one_rank(worker, batches[0][each])[1] for each in (0, 2, 3)]
    for name, value in last.items():
        torch.testing.assert_close(got[name], value + sum(each[name] for each in first) / 4, msg=name)


def _freeze(names: tuple[str, ...]) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    oracle, rank, batches = sharded_net.oracle_of(model), dist.get_rank(), sharded_net.micro_batches(3)
    _backward(model, sharded_net.squared_error, batches[0][rank], syncs=False)
    frozen = {name for name, _ in model.named_parameters() if name.startswith(names)}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    _backward(model, sharded_net.squared_error, batches[1][rank], syncs=False)
    _backward(model, sharded_net.squared_error, batches[2][rank], syncs=True)
    got, (_, all_three), (_, first) = full_gradients(model), oracle.gradients(batches), oracle.gradients(batches[:1])
    for name, value in all_three.items():
        torch.testing.assert_close(got[name], first[name] if name in frozen else value, msg=name)


@on_ranks(4, local=2)
def test_what_is_frozen_after_the_first_micro_batch_keeps_its_gradient() -> None:
    for names in (("blocks.1.up.weight",), ("blocks.1",)):  # a parameter, and a unit
        _freeze(names)


@on_ranks(3, local=3)
def test_what_is_frozen_and_cleared_is_cleared() -> None:
    """Its `.grad` stands for what waits, as if it were not frozen."""
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    rank, batches = dist.get_rank(), sharded_net.micro_batches(3)
    _backward(model, sharded_net.squared_error, batches[0][rank], syncs=False)
    weight = model.blocks[1].up.weight
    weight.requires_grad_(False)
    _backward(model, sharded_net.squared_error, batches[1][rank], syncs=False)
    assert weight.grad is not None
    weight.grad = None
    _backward(model, sharded_net.squared_error, batches[2][rank], syncs=True)
    assert weight.grad is None
    oracle = sharded_net.oracle_of(model)
    oracle.model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    assert_gradients(model, oracle, batches)


class Twice(sharded_net.Net):
    """Runs its second block twice, before and after the third."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 2, 1):
            x = self.blocks[index](x)
        return self.out(x)


def _run_twice(reduces_once: bool) -> None:
    model = sharded_net.shard(sharded_net.build(Twice), cache=WHOLE)
    model.set_reduce_once_per_backward(reduces_once)
    oracle, rank, batches = sharded_net.oracle_of(model, Twice), dist.get_rank(), sharded_net.micro_batches(4)
    shards = model.memory().device_bytes
    for number in (0, 2):
        model.set_requires_gradient_sync(number == 2)
        losses = [sharded_net.squared_error(model, batches[number + each][rank]) for each in range(2)]
        with moved(model) as bytes_moved:
            sum(losses).backward()  # type: ignore[union-attr]
        if number == 0:
            assert bytes_moved.sent("local", "gradients") == bytes_moved.gradients == 0
            assert model.memory().device_bytes == shards + _whole_bytes(model)
    assert_gradients(model, oracle, batches)


@on_ranks(4, local=2)
def test_a_unit_that_runs_several_times_before_a_backward() -> None:
    """In one forward of the root, and in two forwards of it."""
    for reduces_once in (False, True):
        _run_twice(reduces_once)


# -- disturbances ------------------------------------------------------------------------------------------------------


@on_ranks(3, local=3)
def test_an_audit_between_micro_batches_disturbs_nothing() -> None:
    found = []
    for audits in (False, True):
        model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
        batches, rank = sharded_net.micro_batches(3), dist.get_rank()
        for number, batch in enumerate(batches):
            _backward(model, sharded_net.squared_error, batch[rank], syncs=number == 2)
            if audits:
                before, held = model.traffic.snapshot(), model.memory().device_bytes
                laconic.audit(model, sharded_net.inputs(77, rank), sharded_net.squared_error)
                assert (model.traffic.snapshot() - before).total(purpose="gradients") == 0
                assert model.memory().device_bytes == held
        assert_gradients(model, sharded_net.oracle_of(model), batches)
        found.append(full_gradients(model))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def _fail(syncs: bool, resets: bool) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    oracle, rank, batches = sharded_net.oracle_of(model), dist.get_rank(), sharded_net.micro_batches(4)
    held = model.memory().device_bytes
    _backward(model, sharded_net.squared_error, batches[0][rank], syncs=False)
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: Breaks.apply(output))
    with pytest.raises(ZeroDivisionError):
        _backward(model, sharded_net.squared_error, batches[1][rank], syncs=syncs)
    handle.remove()
    if resets:
        model.reset_iter_state()
    if syncs:
        model.zero_grad()  # what is in `.grad` already stays, as under DDP
    if resets:
        assert model.memory().device_bytes == held
    _accumulate(model, batches[2:])
    assert_gradients(model, oracle, batches[2:])


@on_ranks(4, local=2)
def test_an_exception_in_the_second_backward_drops_what_waits() -> None:
    for syncs in (False, True):
        for resets in (True, False):  # by `reset_iter_state`, or by the next forward
            _fail(syncs, resets)


@on_ranks(3, local=1)
def test_nested_blocks_without_sync_and_accumulation_with_sync() -> None:
    model = sharded_net.shard(sharded_net.build(), cache=WHOLE)
    oracle, rank, batches = sharded_net.oracle_of(model), dist.get_rank(), sharded_net.micro_batches(3)
    with model.no_sync():
        with model.no_sync(), moved(model) as first:
            sharded_net.squared_error(model, batches[0][rank]).backward()
        with moved(model) as second:
            sharded_net.squared_error(model, batches[1][rank]).backward()
    with moved(model) as last:
        sharded_net.squared_error(model, batches[2][rank]).backward()
    sent = [each.gradients for each in (first, second, last)]
    assert sent == [0, 0, reduce_bytes("node", buckets(model))]
    assert_gradients(model, oracle, batches)
    model.zero_grad()
    with moved(model) as all_sync:
        for batch in batches:
            sharded_net.squared_error(model, batch[rank]).backward()
    assert all_sync.gradients == 3 * reduce_bytes("node", buckets(model)), "who syncs each time sends each time"
    assert_gradients(model, oracle, batches)


@on_ranks(4, local=2)
def test_units_may_let_gradients_wait_in_different_forms_and_sync_at_different_times() -> None:
    model: Any = sharded_net.build()
    mesh = laconic.init_mesh("cpu")
    caches = (WHOLE, Cache(where="host"), Cache(where="rank", gradients="rank"))
    for block, cache in zip(model.blocks, caches, strict=True):
        laconic.fully_shard(block, mesh=mesh, cache=cache)
    laconic.fully_shard(model, mesh=mesh, cache=WHOLE)
    oracle, rank, batches = sharded_net.oracle_of(model), dist.get_rank(), sharded_net.micro_batches(3)
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == 2)
        model.blocks[0].set_requires_gradient_sync(number == 1)
        if number == 2:
            model.blocks[0].set_requires_gradient_sync(True)
        sharded_net.squared_error(model, batch[rank]).backward()
    assert_gradients(model, oracle, batches)


@on_ranks(4, local=2)
def test_training_equals_training_with_sums_of_the_node() -> None:
    """With AdamW, clipping and retained graphs; the curves agree as closely as orders of sums do."""
    curves = []
    for cache in (Cache(where="device"), Cache(where="device", gradients="rank")):
        model = sharded_net.shard(sharded_net.build(), cache=cache)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(4):
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                loss = sharded_net.squared_error(model, sharded_net.inputs(3 * step + number, dist.get_rank()))
                loss.backward(retain_graph=number == 1)
                if number == 1:
                    loss.backward()
                losses.append(float(loss))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        curves.append(torch.tensor(losses))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-6)
