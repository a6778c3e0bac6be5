"""What a user has cleared is cleared, whichever way, also sums that have not reached `.grad` yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks
from tests.support.sharded_net import (
    FailsInBackward,
    buckets,
    build,
    full_gradients,
    inputs,
    oracle_of,
    shard,
    small_net,
    squared_error,
)

WHOLE = laconic.Cache(gradients="rank")


def set_to_none(model: Any, optimizer: Any = None) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_in_place(model: Any, optimizer: Any = None) -> None:
    for parameter in model.parameters():
        parameter.grad.zero_()


def fail_in_forward(model: Any, optimizer: Any) -> None:
    """A failed forward drops nothing by itself; what the user clears then is cleared."""
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(1, 4))
    optimizer.zero_grad()


def fail_in_backward(model: Any, optimizer: Any) -> None:
    """A failed backward drops the sums, as they include a part of its gradients: nothing is to be cleared."""
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: FailsInBackward.apply(output))
    with model.no_sync(), pytest.raises(ZeroDivisionError):
        squared_error(model, inputs(8, dist.get_rank())).backward()
    handle.remove()


WAYS: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "model.zero_grad while gathered": lambda model, optimizer: (model.unshard(), model.zero_grad(), model.reshard()),
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "zeros one by one": lambda model, optimizer: torch.optim.SGD(model.parameters(), foreach=False).zero_grad(False),
    "p.grad = None": set_to_none,
    "p.grad.zero_()": zero_in_place,
    "p.grad.data.zero_()": lambda model, optimizer: [each.grad.data.zero_() for each in model.parameters()],
    "an exception in forward": fail_in_forward,
    "an exception in backward": fail_in_backward,
}


def backward(model: Any, seed: int, *, syncs: bool = True) -> None:
    model.set_requires_gradient_sync(syncs)
    squared_error(model, inputs(100 * seed, dist.get_rank())).backward()


def batches(*seeds: int) -> sharded_net.Batches:
    return [sharded_net.micro_batches(1, seed)[0] for seed in seeds]


def assert_cleared(model: Any, oracle: Any, seeds: tuple[int, ...], cleared: Mapping[str, tuple[int, ...]]) -> None:
    """Assert that gradients are of the batches `seeds`, those of some parameters of others."""
    got = full_gradients(model)
    for chosen in {seeds, *cleared.values()}:
        _, want = oracle.gradients(batches(*chosen))
        for name in (name for name in want if cleared.get(name, seeds) == chosen):
            torch.testing.assert_close(got[name], want[name], msg=f"{name} of {chosen}")


@pytest.mark.parametrize(
    ("world", "local", "ways", "policies"),
    [
        (2, 1, list(WAYS), {"cache": "host"}),
        (2, 1, ["p.grad = None", "p.grad.zero_()"], {"offload_policy": CPUOffloadPolicy()}),
        (2, 2, ["p.grad = None", "p.grad.zero_()"], {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
        (2, 2, list(WAYS), {"cache": WHOLE}),
    ],
    ids=["all", "offload", "mixed precision", "whole"],
)
@on_ranks("world", local="local")
def test_every_way_to_clear(ways: list[str], policies: dict[str, Any]) -> None:
    """Each way clears a sum that waits, alone and beside a gradient that is in `.grad` already."""
    model = shard(build(small_net), **policies)
    oracle = oracle_of(model, small_net)
    _, want = oracle.gradients(batches(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for name in ways:
        for has_synced in (False, True):
            if has_synced:
                backward(model, 1)
                if name == "an exception in backward":
                    model.zero_grad()  # what is in `.grad` already stays, as under DDP
            backward(model, 2, syncs=False)
            WAYS[name](model, optimizer)
            backward(model, 3, syncs=False)
            backward(model, 4)
            torch.testing.assert_close(full_gradients(model), want, msg=f"{name}, {has_synced}")
            model.zero_grad()
    # nothing is cleared that the user has not cleared
    for seed in (1, 2):
        backward(model, seed, syncs=False)
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    backward(model, 3)
    sharded_net.assert_gradients(model, oracle, batches(1, 2, 3))


@pytest.mark.parametrize("cache", ["none", WHOLE], ids=["in the node", "whole"])
@on_ranks(4, local=2)
def test_clearing_some_leaves_others_alone_and_what_no_rank_uses_then_has_no_gradient(cache: Any) -> None:
    model = shard(build(), cache=cache)
    backward(model, 1, syncs=False)
    model.blocks[1].up.weight.grad = None
    model.out.bias.grad.zero_()
    backward(model, 2)
    assert_cleared(model, oracle_of(model), (1, 2), {"blocks.1.up.weight": (2,), "out.bias": (2,)})
    model.zero_grad()
    held = model.memory().device_bytes
    backward(model, 1, syncs=False)
    model.zero_grad()
    skipped, model.blocks[2] = model.blocks[2], nn.Identity()
    backward(model, 0)
    model.blocks[2] = skipped
    assert all(parameter.grad is None for parameter in model.blocks[2].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[1].parameters())
    model.zero_grad()
    assert model.memory().device_bytes == held


@pytest.mark.parametrize("cache", ["none", WHOLE], ids=["in the node", "whole"])
@on_ranks(3, local=3)
def test_ranks_that_clear_different_things_go_on_together(cache: Any) -> None:
    """No rank waits for a message that others do not send."""
    model = shard(build(), cache=cache)
    rank = dist.get_rank()
    for clear in (set_to_none, zero_in_place):
        for syncs in (False, True):
            backward(model, 1, syncs=syncs)
            if rank == 0:
                clear(model)
            elif rank == 1:
                model.blocks[0].up.weight.grad = None
            backward(model, 2, syncs=False)
            backward(model, 3)
            assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


@on_ranks(2, local=1)
def test_sums_that_wait_for_other_islands_are_cleared_too() -> None:
    model = shard(build(), mesh=laconic.init_mesh("cpu", islands=2, nodes=1, local=1))
    oracle = oracle_of(model)
    oracle.num_nodes, oracle.num_local = 2, 1
    model.set_requires_all_reduce(False)
    backward(model, 1)
    model.zero_grad()
    backward(model, 2)
    model.blocks[0].up.weight.grad.zero_()
    model.set_requires_all_reduce(True)
    backward(model, 3)
    assert_cleared(model, oracle, (2, 3), {"blocks.0.up.weight": (3,)})


@on_ranks(2, local=1)
def test_a_sum_that_is_still_under_way_after_a_backward_is_cleared_as_well() -> None:
    model = shard(build())
    model(inputs(0, 0)[0])
    model.set_is_last_backward(False)
    backward(model, 1)
    model.zero_grad()
    model.set_is_last_backward(True)
    backward(model, 2)
    sharded_net.assert_gradients(model, oracle_of(model), batches(2))


@on_ranks(2, local=1)
def test_what_stands_in_grad_takes_no_memory_and_no_optimizer_moves_a_parameter_by_it() -> None:
    model = shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    partial = sum(bucket.layout.shard_numel * bucket.cluster.num_nodes * 4 for bucket in buckets(model))
    held = model.memory().device_bytes + partial
    backward(model, 2, syncs=False)
    assert model.memory().device_bytes == held
    values = sharded_net.full_parameters(model)
    optimizer.step()
    assert all(torch.equal(value, values[name]) for name, value in sharded_net.full_parameters(model).items())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.memory().device_bytes == held
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm == 0
    assert model.memory().device_bytes == held + sum(4 * p.to_local().numel() for p in model.parameters())
    with pytest.warns(UserWarning, match=r".grad of .*weight.* was scaled or clipped while its sums wait"):
        backward(model, 3, syncs=False)
    model.zero_grad()
    assert model.memory().device_bytes == held
