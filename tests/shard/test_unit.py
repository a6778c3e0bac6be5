"""The memory and state of units after forward alone, after a step, and after an exception."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import sharded_net
from tests.support.launch import on_ranks


@pytest.mark.parametrize("cache", ["none", "device"])
@on_ranks(4, local=2)
def test_forward_without_gradients_leaves_nothing_gathered(cache: str) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=cache)
    x = sharded_net.inputs(0, dist.get_rank())[0]
    want = sharded_net.build()(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                torch.testing.assert_close(model(x), want)
                sharded_net.assert_nothing_gathered(model)
        assert model.memory().device_bytes == sharded_net.held_bytes(model)
    before = model.memory().device_bytes
    if cache != "device":
        assert before == sum(bucket.shard.nbytes for bucket in sharded_net.buckets(model))
    with torch.no_grad():  # as generation does: one module of the model on its own
        model.blocks[1](torch.zeros(2, 17))
        sharded_net.assert_nothing_gathered(model)
        model(x)
    sharded_net.assert_nothing_gathered(model)
    assert model.memory().device_bytes == before
    with sharded_net.moved(model) as m:
        sharded_net.train_step(model)  # the order that evaluation recorded must not matter
    blocks = sharded_net.gather_bytes("node", sharded_net.buckets(model.blocks))
    root = sharded_net.gather_bytes("node", model._laconic_unit.buckets)
    assert m.weights == (2 * blocks + root if cache == "none" else 0)
    assert model.memory().device_bytes == sharded_net.held_bytes(model)


@pytest.mark.parametrize("cache", ["host", "rank"])
@on_ranks(2, local=1)
def test_a_model_without_references_is_freed(cache: str) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=cache)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        sharded_net.train_step(model, optimizer, step)
    known = [weakref.ref(model), *(weakref.ref(bucket.shard) for bucket in sharded_net.buckets(model))]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in known] == [None] * len(known)


@on_ranks(4, local=2)
def test_memory_is_bounded_by_units_in_flight_and_the_host_cache_adds_none() -> None:
    """Between steps only the shards are held."""
    peaks: dict[str, int] = {}
    for cache in ("none", "host", "device"):
        model = sharded_net.shard(sharded_net.build(partial(sharded_net.Net, 8)), cache=cache)
        by_step = []
        for step in range(3):
            model.reset_peak_memory()
            sharded_net.train_step(model, seed=step)
            by_step.append(model.memory().device_peak_bytes)
            assert model.memory().device_bytes == sum(bucket.shard.nbytes for bucket in sharded_net.buckets(model))
        assert by_step[1] == by_step[2], "from the second step on, the peak does not depend on timing"
        peaks[cache] = max(by_step)
    shards = sum(bucket.shard.nbytes for bucket in sharded_net.buckets(model))
    slices = sum(4 * bucket.form.geometry.node_numel for bucket in sharded_net.buckets(model))
    root = sum(4 * bucket.layout.numel for bucket in model._laconic_unit.buckets)
    block = sum(4 * bucket.layout.numel for bucket in sharded_net.buckets(model.blocks[0]))
    # Shards and their gradients; full buffers of the root, the present block and the next one; gradients of the bucket
    # that backward writes and of the one that is reduced.
    bound = 2 * shards + root + 2 * block + 2 * block
    assert peaks["none"] <= bound
    assert peaks["host"] <= peaks["none"]
    assert peaks["none"] < peaks["device"] <= peaks["none"] + slices
    assert bound < shards + root + 8 * block, "the bound excludes a model that is gathered as a whole"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, peaks)
    assert everywhere == [peaks] * len(everywhere)


@on_ranks(4, local=2)
def test_a_forward_without_backward_leaves_no_trace() -> None:
    """A loss without backward (not finite, for example) must not change the memory and gradients of later steps."""
    seen = []
    for num_forwards in (0, 3):
        model = sharded_net.shard(sharded_net.build(partial(sharded_net.Net, 4)))
        sharded_net.train_step(model)
        for _ in range(num_forwards):
            sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank()))
        model.reset_peak_memory()
        sharded_net.accumulate(model, sharded_net.micro_batches(1))
        seen.append((model.memory().device_peak_bytes, model.out.bias.grad.full_tensor().tolist()))
        sharded_net.assert_nothing_gathered(model)
    assert seen[0] == seen[1]


def _fail_in_forward(x: Tensor) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize(("cache", "resets"), [("host", False), ("none", True)])
@on_ranks(4, local=2)
def test_a_step_after_an_exception_is_an_ordinary_step(cache: str, resets: bool) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=cache)
    oracle, batches = sharded_net.oracle_of(model), sharded_net.micro_batches(1)
    x, _ = batches[0][0]
    sharded_net.train_step(model)
    for fail in (_fail_in_forward, sharded_net.FailsInBackward.apply):
        handle = model.blocks[1].register_forward_hook(lambda module, args, output, fail=fail: fail(output))
        with pytest.raises(ZeroDivisionError):
            sharded_net.accumulate(model, batches)
        handle.remove()
        if resets:
            model.reset_iter_state()
            sharded_net.assert_nothing_gathered(model)
        model.zero_grad()
        sharded_net.accumulate(model, batches)
        sharded_net.assert_gradients(model, oracle, batches)
        sharded_net.assert_nothing_gathered(model)
        model.zero_grad()
        assert model.memory().device_bytes == sum(bucket.shard.nbytes for bucket in sharded_net.buckets(model))
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: _fail_in_forward(output))
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        model(x)
    sharded_net.assert_nothing_gathered(model)


@pytest.mark.parametrize("recomputes", [None, False, True], ids=["plain", "checkpoint", "reentrant checkpoint"])
@on_ranks(4, local=2)
def test_a_frozen_unit_that_stays_whole_awaits_no_backward(recomputes: bool | None) -> None:
    """Gradients pass through it, and its sharded parameters are shown again behind the root's backward."""
    model = sharded_net.build()
    model.blocks[1].requires_grad_(False)
    model = sharded_net.shard(model, cache="rank")
    if recomputes is not None:
        block = model.blocks[1]
        block.forward = partial(checkpoint, block.forward, use_reentrant=recomputes)
    batches = sharded_net.micro_batches(1)
    _, want = sharded_net.oracle_of(model).gradients(batches)
    for trains in (False, True, False):
        model.blocks[1].requires_grad_(trains)
        loss = sharded_net.squared_error(model, batches[0][dist.get_rank()])
        assert len(model.blocks[1]._laconic_unit.awaited.outputs) == trains
        assert len(model._laconic_unit.awaited.outputs) == 1
        loss.backward()
        sharded_net.assert_nothing_gathered(model)
        got = sharded_net.full_gradients(model)
        assert any(name.startswith("blocks.1.") for name in got) == trains
        torch.testing.assert_close(got, {name: want[name] for name in got})
        model.zero_grad()
