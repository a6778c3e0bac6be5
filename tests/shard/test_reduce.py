"""Gradients over micro-batches and replicas: the bytes that are sent, and sums that equal the oracle's."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import laconic
from tests.reference.step import Oracle
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_equals_oracle
from tests.support.sharded_net import (
    accumulate,
    assert_gradients,
    buckets,
    build,
    gather_bytes,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    reduce_bytes,
    shard,
    squared_error,
)  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "local", "cache", "num_micro_batches"),
    [
        (2, 2, "none", 2),
        (3, 1, "host", 2),
        (2, 2, "device", 1),
        (2, 2, "rank", 2),
        (1, 1, "host", 2),
    ],
)
def test_weights_cross_once_per_optimizer_step_and_gradients_once(
    nodes: int, local: int, cache: Any, num_micro_batches: int
) -> None:
    scenario = Scenario(nodes=nodes, local=local, cache=cache, micro_batches=num_micro_batches)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs)
    model = runs[0].model
    root, blocks, every = model._laconic_unit.buckets, buckets(model.blocks), buckets(model)
    gathers = laconic.Cache.of(cache).node_gathers_per_step(num_micro_batches=num_micro_batches)
    # The root stays gathered between its forward and its backward: one gather per micro-batch without a cache.
    root_gathers = num_micro_batches if cache == "none" else 1
    for m in runs[0].sent:
        assert m.weights == gathers * gather_bytes("node", blocks) + root_gathers * gather_bytes("node", root)
        assert m.gradients == reduce_bytes("node", every)
        in_node = [gather_bytes("local", each) for each in (blocks, root)]
        num_local = [1, 1] if cache == "rank" else [2 * num_micro_batches, num_micro_batches]
        assert m.sent("local", "weights") == sum(map(operator.mul, num_local, in_node))
        assert m.sent("local", "gradients") == num_micro_batches * reduce_bytes("local", every)


class Routed(nn.Module):
    """A block with two buckets, one for each dtype. All ranks use the first, some ranks the second."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor, chosen: bool) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x.double()).float() if chosen else y


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, x: Tensor, chosen: bool) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x, chosen))
        return x


def routed_error(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
    return model(*batch).square().mean()


@pytest.mark.parametrize("cache", ["host", laconic.Cache(gradients="rank")], ids=["host", "whole"])
@on_ranks(4, local=2)
def test_a_bucket_that_only_some_ranks_use(cache: Any) -> None:
    """Also in some micro-batches only; what no rank uses has no gradient."""
    model = shard(build(Router), cache=cache)
    oracle = oracle_of(model, Router, routed_error)
    by_micro_batch: list[list[set[int]]] = [[{0}], [{0}, set()], [{1, 3}, {0}], [set(), set()]]
    for chosen in by_micro_batch:
        batches = [[(inputs(number, rank)[0], rank in some) for rank in range(4)] for number, some in enumerate(chosen)]
        model.zero_grad()
        accumulate(model, batches, routed_error)
        if any(chosen):
            assert_gradients(model, oracle, batches)
    assert all(block.sometimes.weight.grad is None for block in model.blocks)
    assert all(block.always.weight.grad is not None for block in model.blocks)


@on_ranks(1)
def test_a_sink_takes_whole_matrices_only_and_a_resized_output_is_an_error() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.stack = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(2, 3, 5))

    model: Any = laconic.fully_shard(build(Stack), mesh=laconic.init_mesh("cpu"))
    [bucket] = buckets(model)
    assert model._laconic_unit.root
    gradients: Any = bucket.full._sink
    for shape, index, dtype in (((3, 5), 1, torch.float32), ((2, 3, 5), 1, torch.float32), ((5, 3), 0, torch.float32)):
        assert not gradients.accepts(index, shape, dtype), shape
    assert gradients.accepts(0, (3, 5), torch.float32)
    assert not gradients.accepts(0, (3, 5), torch.bfloat16)
    left, right = torch.ones(3, 7), torch.ones(7, 5)
    for one, other, index in ((left, right, 1), (torch.ones(2, 3, 7), torch.ones(2, 7, 5), 1), (left.t(), left, 0)):
        with pytest.raises(ValueError, match=r"a product \(.*\) cannot be the gradient of"):
            gradients.add_product(index, one, other)
    resize = "import torch; torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(2, 3, 5))"
    with pytest.raises(UserWarning, match="was resized"):
        exec(resize, {"__name__": "laconic.shard.reduce"})


def fail_inside(model: Any, units: list[Any]) -> None:
    with model.no_sync(), model.no_sync():
        assert not any(unit.requires_gradient_sync for unit in units)
        raise ZeroDivisionError


@on_ranks(3, local=1)
def test_no_sync_restores_what_it_found() -> None:
    model, batches, sent = shard(build()), micro_batches(2), []
    model.blocks[0].set_requires_gradient_sync(False)
    units = [module._laconic_unit for module in (model, *model.blocks)]
    with pytest.raises(ZeroDivisionError):
        fail_inside(model, units)
    assert [unit.requires_gradient_sync for unit in units] == [True, False, True, True]
    model.blocks[0].set_requires_gradient_sync(True)
    for batch, block in zip(batches, (model.no_sync(), nullcontext()), strict=True):
        with moved(model) as bytes_moved, block:
            squared_error(model, batch[dist.get_rank()]).backward()
        sent.append(bytes_moved.gradients)
    assert sent == [0, reduce_bytes("node", buckets(model))]
    assert_gradients(model, oracle_of(model), batches)


@on_ranks(6, local=1)
def test_replicas_train_as_one_model() -> None:
    """Train a step as the mean over all ranks, and count the bytes between the replicas."""
    mesh, accumulation = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp_replicate", "dp_shard")), 2
    other = shard(build(), mesh=mesh)
    laconic.LocalSteps(other, torch.optim.SGD(other.parameters()), mesh=mesh)  # islands of another model change nothing
    model = shard(build(), mesh=mesh, cache="host")
    oracle, batches = Oracle(build(), squared_error, num_nodes=2, num_local=3), micro_batches(accumulation)
    replicate, cut = model.inp.weight.placements
    assert replicate.is_replicate()
    assert not cut.is_replicate()
    for _ in range(2):
        with moved(model) as m:
            for number, batch in enumerate(batches):
                model.set_requires_all_reduce(number == accumulation - 1)
                squared_error(model, batch[dist.get_rank()]).backward()
        assert_gradients(model, oracle, batches)
        shards = sum(bucket.layout.shard_numel * 4 for bucket in buckets(model))
        assert m.sent("island", "gradients") == shards, "2 (R - 1) / R of each shard, R = 2, once per step"
        model.zero_grad()


@on_ranks(4, local=1)
def test_units_may_synchronise_replicas_at_different_times() -> None:
    """Only the root sums its gradients over the replicas in the first backward; all units do in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model, batches = shard(build(), mesh=mesh), micro_batches(2)
    for number, batch in enumerate(batches):
        for block in model.blocks:
            block.set_requires_gradient_sync(number == 1)
        squared_error(model, batch[dist.get_rank()]).backward()
    assert_gradients(model, Oracle(build(), squared_error, num_nodes=2, num_local=2), batches)


@on_ranks(2, local=1)
def test_replicas_agree_on_the_parameters_that_were_used() -> None:
    """A gradient that only one replica has reaches the other; one that none has stays None."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.forward = lambda x: model[0](x) + (model[1](x) if dist.get_rank() == 0 else 0)
    laconic.fully_shard(model, mesh=mesh)
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model[1].bias.grad.full_tensor(), torch.ones(3))  # the mean of 2 and nothing
    assert model[2].bias.grad is None
