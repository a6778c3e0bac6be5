"""`broadcast_buffers=True` against DDP's rule, buffer by buffer after each forward; and what is said without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.support.launch import on_ranks, run_ranks

WIDTH = 6


class Counting(nn.Module):
    """Buffers of its own: one that is replaced, one that does not persist, an integer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ones", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            self.seen += int(x.detach().sum().abs() * 100)
        return x * self.ones[0] - self.mean


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*norms, Counting(), nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))


class Naive(nn.Module):
    """DDP's rule: before a forward that follows a backward which synced, all have the buffers of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.is_due = make_model(), True

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.module.buffers() if self.is_due else ():
            dist.broadcast(buffer, 0)
        self.is_due = False
        return self.module(x)

    def no_sync(self) -> Any:
        return nullcontext()

    def end_backward(self) -> None:
        self.is_due = True
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()  # type: ignore[operator]


def shard(*, inner: bool, root: bool, mesh: Any = None) -> nn.Sequential:
    model = make_model()
    for index in (0, 1):
        laconic.fully_shard(model[index], mesh=mesh, broadcast_buffers=inner)
    return laconic.fully_shard(model, mesh=mesh, broadcast_buffers=root)


def run(model: Any, after: Callable[[int], None] = lambda index: None) -> list[dict[str, Tensor]]:
    """Train with micro-batches that sync and do not, and evaluate in between. Returns the buffers after each."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for index, kind in enumerate(["sync", "sync", "no sync", "no sync", "sync", "eval", "eval", "sync", "no sync"]):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * index + dist.get_rank()))
        model.train(kind != "eval")
        with torch.no_grad() if kind == "eval" else model.no_sync() if kind == "no sync" else nullcontext():
            output = model(x)
            if kind != "eval":
                output.square().sum().backward()
        if kind == "sync":
            getattr(model, "end_backward", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()
        seen.append({name.removeprefix("module."): buffer.clone() for name, buffer in model.named_buffers()})
        after(index)
    return seen


def differs(buffer: Tensor) -> bool:
    all_of_them = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, buffer)
    return not all(torch.equal(each, buffer) for each in all_of_them)


@pytest.mark.machine
@on_ranks(2, local=1)
def test_the_naive_twin_is_ddp() -> None:
    torch.testing.assert_close(run(Naive()), run(DistributedDataParallel(make_model())), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("world", "islands", "nodes", "local"), [(3, 1, 3, 1), (4, 2, 1, 2)])
@on_ranks("world", local="local")
def test_all_buffers_after_each_forward_are_those_of_ddp(islands: int, nodes: int, local: int) -> None:
    """Whichever unit asks for it, on each arrangement of the ranks."""
    want = run(Naive())
    assert not torch.equal(want[-1]["0.1.running_mean"], want[0]["0.1.running_mean"])
    model = shard(inner=False, root=True, mesh=laconic.init_mesh("cpu", islands=islands, nodes=nodes, local=local))
    torch.testing.assert_close(run(model), want, rtol=1e-4, atol=1e-5)


@on_ranks(2, local=1)
def test_one_message_for_each_dtype_crosses_where_ddp_sends_one() -> None:
    sent: dict[bool, list[int]] = {}
    for on in (False, True):
        model: Any = shard(inner=on, root=on)
        direction: Any = "sent" if dist.get_rank() == 0 else "received"
        totals = [model.traffic.snapshot().total("node", "control", direction)]
        run(model, lambda index: totals.append(model.traffic.snapshot().total("node", "control", direction)))  # noqa: B023
        sent[on] = [after - before for before, after in pairwise(totals)]
    nbytes = sum(buffer.nbytes for buffer in make_model().buffers())
    extra = [with_it - without for with_it, without in zip(sent[True], sent[False], strict=True)]
    assert extra == [nbytes * due for due in (True, True, True, False, False, True, False, False, True)]


@on_ranks(2, local=1)
def test_an_inner_unit_alone_covers_its_own_buffers() -> None:
    of_evaluation = run(shard(inner=True, root=False))[5]  # after a step
    own = [name for name, each in of_evaluation.items() if each.is_floating_point() and differs(each)]
    assert own == ["2.mean", "4.running_mean", "4.running_var"]


def keep_their_own() -> None:
    assert differs(run(shard(inner=False, root=False))[-1]["0.1.running_mean"])


def test_without_the_option_ranks_keep_their_own_and_the_first_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(keep_their_own, 2, local=1)
    [text] = [str(each.message) for each in caught if "broadcast_buffers" in str(each.message)]
    assert text.startswith("0.1.running_mean and 5 more buffers change in forward")


@on_ranks(2, local=1)
def test_islands_that_train_on_their_own_keep_their_own_buffers() -> None:
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    model = shard(inner=True, root=True, mesh=mesh)
    laconic.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    assert differs(run(model)[-1]["0.1.running_mean"])
