"""`Cache(gradients="rank")`: gradients wait whole and are summed once a step: [Note: Gradients that wait whole].

The sums have another order than those of `gradients="node"`: over micro-batches first, then over ranks. Where sums are
exact, both have the same bits: test_micro_batches_are_summed_in_float32 in test_mixed_precision.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic import Cache
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_equals_oracle
from tests.support.sharded_net import (
    Moved,
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
    partly_frozen,
    reduce_bytes,
    shard,
    squared_error,
)

WHOLE = Cache(gradients="rank")


def _whole_bytes(model: Any) -> int:
    """The bytes of all gradients, whole."""
    trained = [bucket for bucket in buckets(model) if not bucket.stored.is_frozen]
    return sum(bucket.layout.numel * bucket.reduce_dtype.itemsize for bucket in trained)


def _shard_bytes(model: Any) -> int:
    return sum(bucket.shard.nbytes for bucket in buckets(model))


def _backward(model: Any, batch: Any, *, syncs: bool, loss: Any = squared_error) -> Moved:
    """One micro-batch. Returns the bytes of its backward; one that does not sync sends none to other nodes."""
    model.set_requires_gradient_sync(syncs)
    value = loss(model, batch[dist.get_rank()])
    with moved(model) as bytes_moved:
        value.backward()
    if not syncs:
        for level in ("node", "island"):
            assert bytes_moved.sent(level, "gradients") == 0
    return bytes_moved


# -- bits, bytes and memory --------------------------------------------------------------------------------------------


@on_ranks(4, local=2)
def test_gradients_cross_once_a_step_inside_the_node_too() -> None:
    """Two steps of three micro-batches. In between a rank holds whole gradients, and afterwards nothing more."""
    model = shard(build(partly_frozen), cache=WHOLE)
    oracle, shards = oracle_of(model, partly_frozen), _shard_bytes(model)
    trained = [bucket for bucket in buckets(model) if not bucket.stored.is_frozen]
    for seed in range(2):
        batches = micro_batches(3, seed)
        for number, batch in enumerate(batches):
            sent = _backward(model, batch, syncs=number == 2)
            if number == 2:
                for level in ("node", "local"):
                    assert sent.sent(level, "gradients") == reduce_bytes(level, trained)
            else:
                assert sent.sent("local", "gradients") == 0
                assert model.memory().device_bytes == shards + _whole_bytes(model)
                assert not any(each.grad.elements is not None for each in model.parameters() if each.requires_grad)
            assert_nothing_gathered(model)
        kept = sum(bucket.shard.nbytes for bucket in trained)
        assert model.memory().device_bytes == shards + kept, "the shards and their gradients"
        assert_gradients(model, oracle, batches)
        assert all(parameter.grad is None for parameter in model.blocks[1].parameters())
        model.zero_grad()
        assert model.memory().device_bytes == shards


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float64], ids=str)
@on_ranks(2, local=1)
def test_gradients_wait_in_the_dtype_of_sums_or_float32(reduce_dtype: torch.dtype) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, batches = shard(build(), cache=WHOLE, mp_policy=precision), micro_batches(2)
    _backward(model, batches[0], syncs=False)
    numel = sum(bucket.layout.numel for bucket in buckets(model))
    assert model.memory().device_bytes == _shard_bytes(model) + numel * max(4, reduce_dtype.itemsize)


@on_ranks(4, local=1)
def test_replicas_sum_once_a_step_as_well() -> None:
    """Two islands of two ranks; with a backward in between whose sums wait for the other island."""
    model = shard(build(), cache=WHOLE, mesh=laconic.init_mesh("cpu", islands=2, nodes=1, local=2))
    oracle, batches = oracle_of(model), micro_batches(3)
    oracle.num_nodes, oracle.num_local = 2, 2
    for first_to_sync in (2, 1):
        with moved(model) as bytes_moved:
            for number, batch in enumerate(batches):
                model.set_requires_all_reduce(number == 2)
                _backward(model, batch, syncs=number >= first_to_sync)
        assert bytes_moved.sent("island", "gradients") == _shard_bytes(model)
        assert_gradients(model, oracle, batches)
        model.zero_grad()


# -- which micro-batches use what --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "skips"), [(WHOLE, (0, 1)), (WHOLE, (1, 2)), ("host", (1, 2))])
@on_ranks(4, local=2)
def test_a_unit_that_some_micro_batches_skip(cache: Any, skips: tuple[int, ...]) -> None:
    """If the last micro-batch does not use a unit, its waiting gradients are summed at the end."""
    model = shard(build(), cache=cache)

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
    for level in ("node", "local") if cache == WHOLE else ("node",):
        assert bytes_moved.sent(level, "gradients") == reduce_bytes(level, buckets(model))
    assert_gradients(model, oracle_of(model, loss=loss), numbered)


@pytest.mark.parametrize("cache", [WHOLE, "none"], ids=["whole", "in the node"])
@on_ranks(4, local=2)
def test_what_is_frozen_after_the_first_micro_batch_keeps_its_gradient(cache: Any) -> None:
    """A parameter, and a unit. Where it is cleared, too, it has none: `.grad` stands for what waits."""
    model = shard(build(), cache=cache)
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


def test_units_may_let_gradients_wait_in_different_forms_and_sync_at_different_times() -> None:
    forms = {"blocks.0": WHOLE, "blocks.1": Cache(where="host"), "blocks.2": Cache(where="rank", gradients="rank")}
    own = {name: {"cache": cache} for name, cache in forms.items()}

    def early(model: Any) -> None:
        """The first block sends its gradients one micro-batch before the others."""
        sync = model.set_requires_gradient_sync
        model.set_requires_gradient_sync = lambda syncs: (sync(syncs), model.blocks[0].set_requires_gradient_sync(True))

    scenario = Scenario(local=2, cache=WHOLE, own=own, micro_batches=3, max_norm=0.5, events={0: early})
    assert_equals_oracle(scenario, scenario.run())
