"""Gradients over micro-batches and replicas: the bytes that are sent, and sums that equal the oracle's."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import (
    Net,
    buckets,
    build,
    full_gradients,
    inputs,
    moved,
    reduce_bytes,
    shard,
    squared_error,
)


def job_accumulation(cache: Any, num_micro_batches: int) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=cache)
    oracle = sharded_net.oracle_of(model)
    root, blocks = model._laconic_unit.buckets, sharded_net.buckets(model.blocks)
    gathers = laconic.Cache.of(cache).node_gathers_per_step(num_micro_batches=num_micro_batches)
    for seed in range(2):
        batches = sharded_net.micro_batches(num_micro_batches, seed)
        with sharded_net.moved(model) as m:
            for number, batch in enumerate(batches):
                model.set_requires_gradient_sync(number == num_micro_batches - 1)
                sharded_net.squared_error(model, batch[dist.get_rank()]).backward()
                if number < num_micro_batches - 1:
                    assert not any(p.grad is not None and p.grad.has_memory for p in model.parameters())
                sharded_net.assert_nothing_gathered(model)
        # The root stays gathered between its forward and its backward: one gather per micro-batch without a cache.
        root_gathers = num_micro_batches if cache == "none" else 1
        assert m.weights == gathers * sharded_net.gather_bytes(
            "node", blocks
        ) + root_gathers * sharded_net.gather_bytes("node", root)
        assert m.gradients == sharded_net.reduce_bytes("node", sharded_net.buckets(model))
        in_node = [sharded_net.gather_bytes("local", each) for each in (blocks, root)]
        num_local = [1, 1] if cache == "rank" else [2 * num_micro_batches, num_micro_batches]
        assert m.sent("local", "weights") == sum(map(operator.mul, num_local, in_node))
        assert m.sent("local", "gradients") == num_micro_batches * sharded_net.reduce_bytes(
            "local", sharded_net.buckets(model)
        )
        sharded_net.assert_gradients(model, oracle, batches)
        with torch.no_grad():  # "an optimizer step"
            for parameter in model.parameters():
                parameter.add_(0)
        model.zero_grad()


@pytest.mark.heavy
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("cache", ["none", "host", "device", "rank"])
def test_weights_cross_once_per_optimizer_step_and_gradients_once(cache: str, num_micro_batches: int) -> None:
    run_ranks(job_accumulation, 4, cache, num_micro_batches, local=2)


@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (3, 1), (3, 3), (6, 2)])
def test_accumulation_on_other_meshes(world_size: int, local: int) -> None:
    run_ranks(job_accumulation, world_size, "host" if local < 3 else "none", 2, local=local)


class Line(nn.Module):
    """Linear layers of small integers without bias: sums of products are exact in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(2))
        self.out = nn.Linear(7, 3, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-2, 3, p.shape).float())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.out(x)


def integer_batch(seed: int, rank: int) -> Tensor:
    return torch.randint(-3, 4, (4, 7), generator=torch.Generator().manual_seed(100 * seed + rank)).float()


@pytest.mark.parametrize(("world_size", "local", "cache"), [(4, 2, "host"), (6, 3, "none"), (3, 1, "device")])
@on_ranks("world_size", local="local")
def test_gradients_of_integers_are_exact(cache: Any) -> None:
    model = sharded_net.shard(sharded_net.build(Line), cache=cache)
    size = dist.get_world_size()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).sum()

    oracle = sharded_net.oracle_of(model, Line, loss)
    batches = [[integer_batch(a, rank) for rank in range(size)] for a in range(2)]
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == 1)
        loss(model, batch[dist.get_rank()]).backward()
    sharded_net.assert_gradients(model, oracle, batches, rtol=0, atol=0)


@on_ranks(4, local=2)
def test_partial_sums_of_a_unit_the_last_micro_batch_skips_are_sent() -> None:
    """The last micro-batch skips a block: the partial sums of the earlier ones must still be sent."""
    model = sharded_net.shard(sharded_net.build(), cache="host")
    batches = sharded_net.micro_batches(2)
    model.set_requires_gradient_sync(False)
    sharded_net.squared_error(model, batches[0][dist.get_rank()]).backward()
    model.set_requires_gradient_sync(True)

    def without_last(net: Any, batch: Any) -> Tensor:
        hidden = net.inp(batch[0])
        for block in list(net.blocks)[:2]:
            hidden = block(hidden)
        return (net.out(hidden) - batch[1]).square().mean()

    class Skip(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    last = model.blocks[2]
    model.blocks[2] = Skip()
    sharded_net.squared_error(model, batches[1][dist.get_rank()]).backward()
    model.blocks[2] = last
    oracle = sharded_net.oracle_of(model)
    _, first = oracle.gradients(batches[:1])
    oracle.loss = without_last
    _, second = oracle.gradients(batches[1:])
    got = sharded_net.full_gradients(model)
    assert set(got) == set(first)
    assert set(second) == {name for name in first if "blocks.2" not in name}
    for name, value in first.items():
        torch.testing.assert_close(got[name], value + second.get(name, 0), msg=name)


@on_ranks(4, local=2)
def test_accumulating_with_synchronisation_on_gives_the_same_gradients() -> None:
    """Without turning synchronisation off, gradients add up as well, at the cost of sending each time."""
    model = sharded_net.shard(sharded_net.build(), cache="host")
    batches = sharded_net.micro_batches(2)
    with sharded_net.moved(model) as m:
        for batch in batches:
            sharded_net.squared_error(model, batch[dist.get_rank()]).backward()
    assert m.gradients == 2 * sharded_net.reduce_bytes("node", sharded_net.buckets(model))
    assert m.weights == sharded_net.gather_bytes("node", sharded_net.buckets(model))
    sharded_net.assert_gradients(model, sharded_net.oracle_of(model), batches)


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


@pytest.mark.parametrize("cache", ["none", "host"])
@on_ranks(4, local=2, timeout_s=60)
def test_a_bucket_that_only_some_ranks_use(cache: str) -> None:
    model = sharded_net.shard(sharded_net.build(Router), cache=cache)
    oracle = sharded_net.oracle_of(model, Router, routed_error)
    for chosen in ({0}, {1, 3}, {0, 1, 2, 3}):
        batches = [[(sharded_net.inputs(0, rank)[0], rank in chosen) for rank in range(dist.get_world_size())]]
        routed_error(model, batches[0][dist.get_rank()]).backward()
        sharded_net.assert_gradients(model, oracle, batches)
        model.zero_grad()


@on_ranks(4, local=2)
def test_gradients_zeroed_in_place() -> None:
    """`zero_grad(set_to_none=False)`: the next gradients are added to the zeros."""
    model = sharded_net.shard(sharded_net.build(), cache="host")
    oracle, batches = sharded_net.oracle_of(model), sharded_net.micro_batches(1)
    for _ in range(2):
        sharded_net.squared_error(model, batches[0][dist.get_rank()]).backward()
        sharded_net.assert_gradients(model, oracle, batches)
        model.zero_grad(set_to_none=False)
        assert all(p.grad.to_local().eq(0).all() for p in model.parameters())


@on_ranks(1)
def test_a_sink_takes_whole_matrices_only_and_a_resized_output_is_an_error() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.stack = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(2, 3, 5))

    model: Any = laconic.fully_shard(sharded_net.build(Stack), mesh=laconic.init_mesh("cpu"))
    [bucket] = sharded_net.buckets(model)
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


MICRO_BATCHES = 3


def accumulate(model: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Sum the gradients of micro-batches; return them, and the bytes that each backward sent across the nodes."""
    sent = []
    for number in range(MICRO_BATCHES):
        loss = squared_error(model, inputs(number, dist.get_rank())) / MICRO_BATCHES
        with moved(model) as bytes_moved:
            if number == MICRO_BATCHES - 1:
                loss.backward()
            else:
                with model.no_sync(), model.no_sync():
                    loss.backward()
        sent.append(bytes_moved.gradients)
    return full_gradients(model), sent


def fail_inside(model: Any, units: list[Any]) -> None:
    with model.no_sync():
        assert not any(unit.requires_gradient_sync for unit in units)
        raise ZeroDivisionError


@on_ranks(3, local=1)
def test_accumulation_equals_one_large_batch_and_crosses_the_wire_once() -> None:
    model = shard(build(Net))
    model.blocks[0].set_requires_gradient_sync(False)
    units = [module._laconic_unit for module in (model, *model.blocks)]
    with pytest.raises(ZeroDivisionError):
        fail_inside(model, units)
    assert [unit.requires_gradient_sync for unit in units] == [True, False, True, True]
    model.blocks[0].set_requires_gradient_sync(True)

    got, sent = accumulate(model)
    assert sent == [0, 0, reduce_bytes("node", buckets(model))]
    oracle = build(Net)
    batches = [inputs(n, rank) for n in range(MICRO_BATCHES) for rank in range(dist.get_world_size())]
    large = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    squared_error(oracle, large).backward()
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)


@pytest.mark.parametrize(
    ("world", "names", "accumulation"),
    [(2, ("dp_replicate", "dp_shard"), 1), (4, ("outer", "inner"), 1), (6, ("dp_replicate", "dp_shard"), 3)],
)
@on_ranks("world", local=1)
def test_replicas_train_as_one_model(names: tuple[str, str], accumulation: int) -> None:
    """Train two steps as the mean over all ranks, and count the bytes between the replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    other = sharded_net.shard(sharded_net.build(), mesh=mesh)
    laconic.LocalSteps(other, torch.optim.SGD(other.parameters()), mesh=mesh)  # islands of another model change nothing
    model: Any = sharded_net.shard(sharded_net.build(), mesh=mesh, cache="host")
    plain, world = sharded_net.build(), dist.get_world_size()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]
    replicate, cut = model.inp.weight.placements
    assert replicate.is_replicate()
    assert not cut.is_replicate()
    for seed in range(2):
        with sharded_net.moved(model) as moved:
            for micro_batch in range(accumulation):
                model.set_requires_all_reduce(micro_batch == accumulation - 1)
                sharded_net.squared_error(
                    model, sharded_net.inputs(10 * seed + micro_batch, dist.get_rank())
                ).backward()
        for rank in range(world):
            for micro_batch in range(accumulation):
                batch = sharded_net.inputs(10 * seed + micro_batch, rank)
                (sharded_net.squared_error(plain, batch) / world).backward()
        for name, gradient in sharded_net.full_gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
        shards = sum(bucket.layout.shard_numel * 4 for bucket in sharded_net.buckets(model))
        assert moved.sent("island", "gradients") == shards, "2 (R - 1) / R of each shard, R = 2, once per step"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, whole in sharded_net.full_parameters(model).items():
        torch.testing.assert_close(whole, plain.get_parameter(name).detach(), msg=name)


@on_ranks(4, local=1)
def test_units_may_synchronise_replicas_at_different_times() -> None:
    """Only the root sums its gradients over the replicas in the first backward; all units do in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model: Any = sharded_net.shard(sharded_net.build(), mesh=mesh)
    plain, world = sharded_net.build(), dist.get_world_size()
    for micro_batch in range(2):
        for block in model.blocks:
            block.set_requires_gradient_sync(micro_batch == 1)
        sharded_net.squared_error(model, sharded_net.inputs(micro_batch, dist.get_rank())).backward()
        for rank in range(world):
            (sharded_net.squared_error(plain, sharded_net.inputs(micro_batch, rank)) / world).backward()
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)


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
