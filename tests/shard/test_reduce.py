"""Gradients over micro-batches: the bytes that are sent, and sums that equal the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks, run_ranks


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
        assert m.sent("local", "weights") == num_micro_batches * (
            2 * sharded_net.gather_bytes("local", blocks) + sharded_net.gather_bytes("local", root)
        )
        assert m.sent("local", "gradients") == num_micro_batches * sharded_net.reduce_bytes(
            "local", sharded_net.buckets(model)
        )
        sharded_net.assert_gradients(model, oracle, batches)
        with torch.no_grad():  # "an optimizer step"
            for parameter in model.parameters():
                parameter.add_(0)
        model.zero_grad()


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("cache", ["none", "host", "device"])
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
