"""What a unit leaves behind: after forward alone, after a step, after an exception."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.shard.gather import GatherState
from laconic.shard.unit import unit_of
from tests.ranks import run_ranks
from tests.shard.helpers import (
    Net,
    assert_gradients,
    assert_nothing_gathered,
    buckets,
    build,
    full_gradients,
    gather_bytes,
    held_bytes,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    shard,
    squared_error,
    train_step,
)


def job_forward_only(cache: str) -> None:
    model = shard(build(), cache=cache)
    x = inputs(0, dist.get_rank())[0]
    want = build()(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                torch.testing.assert_close(model(x), want)
                assert_nothing_gathered(model)
        assert model.memory().device_bytes == held_bytes(model)
    before = model.memory().device_bytes
    if cache != "device":
        assert before == sum(bucket.shard.nbytes for bucket in buckets(model))
    with torch.no_grad():  # as generation does: many forwards, one module of the model on its own
        for _ in range(3):
            model.blocks[1](torch.zeros(2, 17))
            assert_nothing_gathered(model)
            model(x)
    assert_nothing_gathered(model)
    assert model.memory().device_bytes == before
    with moved(model) as m:
        train_step(model)  # and what recorded eval does to the order must not matter
    blocks = gather_bytes("node", buckets(model.blocks))
    root = gather_bytes("node", model._laconic_unit.buckets)
    assert m.weights == (2 * blocks + root if cache == "none" else 0)
    assert_nothing_gathered(model)
    assert model.memory().device_bytes == held_bytes(model)


@pytest.mark.parametrize("cache", ["none", "host", "device"])
def test_forward_only_use_leaves_nothing_behind(cache: str) -> None:
    run_ranks(job_forward_only, 4, cache, local=2)


def job_let_go(cache: str) -> None:
    model = shard(build(), cache=cache)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        train_step(model, optimizer, step)
    known = [weakref.ref(model), *(weakref.ref(bucket.shard) for bucket in buckets(model))]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in known] == [None] * len(known)


@pytest.mark.parametrize("cache", ["none", "host", "device"])
def test_a_model_that_everybody_lets_go_is_freed(cache: str) -> None:
    run_ranks(job_let_go, 2, cache, local=1)


def job_memory() -> dict[str, int]:
    """Peak of a step by cache. Between steps only the shards are held."""
    peaks = {}
    for cache in ("none", "host", "device"):
        model = shard(build(lambda: Net(8)), cache=cache)
        by_step = []
        for step in range(4):
            model.reset_peak_memory()
            train_step(model, seed=step)
            by_step.append(model.memory().device_peak_bytes)
            assert model.memory().device_bytes == sum(bucket.shard.nbytes for bucket in buckets(model))
        assert len(set(by_step[1:])) == 1, "from the second step on, nothing depends on timing"
        peaks[cache] = max(by_step)
    shards = sum(bucket.shard.nbytes for bucket in buckets(model))
    slices = sum(4 * bucket.slice_numel for bucket in buckets(model))
    root = sum(4 * bucket.layout.numel for bucket in model._laconic_unit.buckets)
    block = sum(4 * bucket.layout.numel for bucket in buckets(model.blocks[0]))
    # Shards and their gradients; gathered: the root, the block that computes and the next one; gradients: the bucket
    # that is written and one that is reduced.
    bound = 2 * shards + root + 2 * block + 2 * block
    assert peaks["none"] <= bound
    assert peaks["host"] <= peaks["none"]
    assert peaks["none"] < peaks["device"] <= peaks["none"] + slices
    assert bound < shards + root + 8 * block, "or the bound says nothing"
    return peaks


@pytest.mark.parametrize(("world_size", "local"), [(4, 2), (3, 1)])
def test_memory_is_bounded_by_units_in_flight_and_the_host_cache_adds_none(world_size: int, local: int) -> None:
    by_rank = run_ranks(job_memory, world_size, local=local)
    assert all(peaks == by_rank[0] for peaks in by_rank)


def gathered_in_backward(model: Any, batch: Any) -> list[list[str]]:
    """For each block's backward, in the order of backward, the blocks that are gathered or being gathered."""
    seen: list[list[str]] = []

    def look(module: nn.Module, _: Any) -> None:
        blocks = [unit for block in model.blocks if (unit := unit_of(block)) is not None]
        seen.append([unit.name for unit in blocks if unit.gather.stage is not GatherState.IDLE])

    handles = [block.register_full_backward_pre_hook(look) for block in model.blocks]
    squared_error(model, batch).backward()
    for handle in handles:
        handle.remove()
    return seen


def job_forward_without_backward() -> None:
    """A loss that is thrown away (not finite, say) must not change what later steps hold and find."""
    model, reference = (shard(build(lambda: Net(5)), cache="none") for _ in range(2))
    batch = inputs(0, dist.get_rank())
    for net in (model, reference):
        train_step(net)
    for _ in range(3):
        squared_error(model, batch)
    want = gathered_in_backward(reference, batch)
    assert len(want) == 5
    assert all(1 <= len(names) <= 2 for names in want), want
    assert gathered_in_backward(model, batch) == want
    for (name, got), gradient in zip(full_gradients(model).items(), full_gradients(reference).values(), strict=True):
        assert torch.equal(got, gradient), name
    assert_nothing_gathered(model)


def test_a_forward_without_backward_leaves_no_trace() -> None:
    run_ranks(job_forward_without_backward, 4, local=2)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("out of memory, say")


class Fragile(Net):
    """Fails on request: in forward, or in backward."""

    fail = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fail == "forward":
                raise RuntimeError("out of memory, say")
            if index == 1 and self.fail == "backward":
                x = Raises.apply(x)
        return self.out(x)


def job_exceptions(cache: str) -> None:
    model = shard(build(Fragile), cache=cache)
    oracle = oracle_of(model)
    batches = micro_batches(1)
    train_step(model)
    for fail in ("forward", "backward"):
        model.fail = fail
        with pytest.raises(RuntimeError, match="out of memory, say"):
            squared_error(model, inputs(7, dist.get_rank())).backward()
        model.fail = ""
        model.zero_grad()
        for _ in range(2):
            squared_error(model, batches[0][dist.get_rank()]).backward()
            assert_gradients(model, oracle, batches)
            assert_nothing_gathered(model)
            model.zero_grad()
        assert model.memory().device_bytes == sum(bucket.shard.nbytes for bucket in buckets(model))
        with torch.no_grad():
            model.fail = "forward" if fail == "forward" else ""
            try:
                model(batches[0][0][0])
            except RuntimeError:
                model.fail = ""
            model(batches[0][0][0])
        assert_nothing_gathered(model)


@pytest.mark.parametrize("cache", ["none", "host"])
def test_a_step_after_an_exception_is_a_step_like_any_other(cache: str) -> None:
    run_ranks(job_exceptions, 4, cache, local=2)
