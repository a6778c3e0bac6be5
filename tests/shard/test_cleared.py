"""What a user has cleared is cleared, whichever way, also sums that have not reached `.grad` yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from tests.support import sharded_net
from tests.support.launch import run_ranks
from tests.support.sharded_net import buckets, build, full_gradients, inputs, oracle_of, shard, squared_error


def set_to_none(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad.zero_()


def zero_the_data(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad.data.zero_()


def fail_in_forward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A failed forward drops nothing by itself; what the user clears then is cleared."""
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(1, 4))
    optimizer.zero_grad()


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def fail_in_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
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
    "a new optimizer": lambda model, optimizer: torch.optim.SGD(model.parameters()).zero_grad(),
    "p.grad = None": set_to_none,
    "p.grad.zero_()": zero_in_place,
    "p.grad.data.zero_()": zero_the_data,
    "an exception in forward": fail_in_forward,
    "an exception in backward": fail_in_backward,
}


def backward(model: Any, seed: int, *, syncs: bool = True) -> None:
    loss = squared_error(model, inputs(100 * seed, dist.get_rank()))
    if syncs:
        loss.backward()
    else:
        with model.no_sync():
            loss.backward()


def batches(*seeds: int) -> sharded_net.Batches:
    return [sharded_net.micro_batches(1, seed)[0] for seed in seeds]


def job_ways(ways: Sequence[str], policies: dict[str, Any]) -> None:
    """Each way clears a sum that waits, alone and beside a gradient that is in `.grad` already."""
    model = shard(build(), **policies)
    oracle = oracle_of(model)
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
            got, (_, want) = full_gradients(model), oracle.gradients(batches(3, 4))
            for parameter, value in want.items():
                torch.testing.assert_close(got[parameter], value, msg=f"{name}, {has_synced}: {parameter}")
            model.zero_grad()
    # nothing is cleared that the user has not cleared
    for seed in (1, 2):
        backward(model, seed, syncs=False)
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    backward(model, 3)
    sharded_net.assert_gradients(model, oracle, batches(1, 2, 3))


@pytest.mark.heavy
@pytest.mark.parametrize(("world_size", "local"), [pytest.param(4, 2, marks=pytest.mark.campaign), (3, 1), (2, 2)])
def test_every_way_to_clear(world_size: int, local: int) -> None:
    run_ranks(job_ways, world_size, list(WAYS), {"cache": "host"}, local=local)


@pytest.mark.parametrize(
    "policies",
    [{"offload_policy": CPUOffloadPolicy()}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}],
    ids=["offload", "mixed precision"],
)
def test_with_policies(policies: dict[str, Any]) -> None:
    run_ranks(job_ways, 2, ["p.grad = None", "p.grad.zero_()"], policies, local=1)


def job_one_parameter() -> None:
    """Clearing one parameter leaves the others alone."""
    model = shard(build())
    oracle = oracle_of(model)
    backward(model, 1, syncs=False)
    model.blocks[1].up.weight.grad = None
    model.out.bias.grad.zero_()
    backward(model, 2)
    got, (_, both), (_, last) = full_gradients(model), oracle.gradients(batches(1, 2)), oracle.gradients(batches(2))
    for name in both:
        is_cleared = name in ("blocks.1.up.weight", "out.bias")
        torch.testing.assert_close(got[name], (last if is_cleared else both)[name], msg=name)


def job_unused() -> None:
    """A parameter that was cleared and then used by no rank has no gradient, rather than zeros."""
    model = shard(build())
    backward(model, 1, syncs=False)
    model.zero_grad()
    x, y = inputs(0, dist.get_rank())
    skipped, model.blocks[2] = model.blocks[2], nn.Identity()
    squared_error(model, (x, y)).backward()
    model.blocks[2] = skipped
    assert all(parameter.grad is None for parameter in model.blocks[2].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[1].parameters())


def job_one_rank_clears() -> None:
    """Ranks that clear different things go on together: no rank waits for a message that others do not send."""
    model = shard(build())
    rank = dist.get_rank()
    for clear in (set_to_none, zero_in_place):
        for syncs in (False, True):
            backward(model, 1, syncs=syncs)
            if rank == 0:
                clear(model, None)  # type: ignore[arg-type]
            elif rank == 1:
                model.blocks[0].up.weight.grad = None
            backward(model, 2, syncs=False)
            backward(model, 3)
            assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


def job_replicas() -> None:
    """Sums that wait for the other islands are cleared, too."""
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
    got, (_, both), (_, last) = full_gradients(model), oracle.gradients(batches(2, 3)), oracle.gradients(batches(3))
    for name in both:
        torch.testing.assert_close(got[name], (last if name == "blocks.0.up.weight" else both)[name], msg=name)


def job_under_way() -> None:
    """A sum that is still under way after a backward is cleared as well."""
    model = shard(build())
    oracle = oracle_of(model)
    model(inputs(0, 0)[0])
    model.set_is_last_backward(False)
    backward(model, 1)
    model.zero_grad()
    model.set_is_last_backward(True)
    backward(model, 2)
    sharded_net.assert_gradients(model, oracle, batches(2))


def job_memory() -> None:
    """What stands in `.grad` takes no memory, keeps no model, and no optimizer moves a parameter by it."""
    model = shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    before = model.memory().device_bytes
    backward(model, 2, syncs=False)
    partial = sum(bucket.layout.shard_numel * bucket.cluster.num_nodes * 4 for bucket in buckets(model))
    assert model.memory().device_bytes == before + partial
    values = sharded_net.full_parameters(model)
    optimizer.step()
    assert all(torch.equal(value, values[name]) for name, value in sharded_net.full_parameters(model).items())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.memory().device_bytes == before + partial
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm == 0
    assert model.memory().device_bytes == before + partial + sum(4 * p.to_local().numel() for p in model.parameters())
    model.zero_grad()
    assert model.memory().device_bytes == before + partial


@pytest.mark.parametrize("job", [job_one_parameter, job_unused, job_one_rank_clears], ids=lambda job: job.__name__)
def test_on_two_nodes(job: Callable[[], None]) -> None:
    run_ranks(job, 4, local=2)


@pytest.mark.parametrize("job", [job_replicas, job_under_way, job_memory], ids=lambda job: job.__name__)
def test_sums(job: Callable[[], None]) -> None:
    run_ranks(job, 2, local=1)
