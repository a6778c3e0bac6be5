"""`broadcast_buffers=True` against DDP, buffer by buffer after each forward; and what is said without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.support.launch import on_ranks, run_ranks

pytestmark = pytest.mark.machine

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


def shard(model: nn.Sequential, *, inner: bool, root: bool, mesh: object = None) -> nn.Sequential:
    for index in (0, 1):
        laconic.fully_shard(model[index], mesh=mesh, broadcast_buffers=inner)  # type: ignore[arg-type]
    return laconic.fully_shard(model, mesh=mesh, broadcast_buffers=root)  # type: ignore[arg-type]


def run(model: nn.Module, after: Callable[[int], None]) -> None:
    """Train with micro-batches that sync and do not, evaluate in between, and recover from a forward that fails."""
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for index, kind in enumerate(["sync", "sync", "no sync", "no sync", "sync", "eval", "eval", "sync", "no sync"]):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * index + rank))
        model.train(kind != "eval")
        if kind == "eval":
            with torch.no_grad():
                model(x)
        elif kind == "no sync":
            with model.no_sync():  # type: ignore[operator]
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after(index)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): buffer.clone() for name, buffer in model.named_buffers()}


def job_as_ddp(islands: int, nodes: int, local: int) -> None:
    """All buffers after each forward are DDP's, whichever unit asks for it, on each arrangement of the ranks."""
    mesh = laconic.init_mesh("cpu", islands=islands, nodes=nodes, local=local)
    want: list[dict[str, Tensor]] = []
    reference = DistributedDataParallel(make_model())
    run(reference, lambda index: want.append(buffers_of(reference)))
    assert not torch.equal(want[-1]["0.1.running_mean"], want[0]["0.1.running_mean"])
    model = shard(make_model(), inner=False, root=True, mesh=mesh)
    run(model, lambda index: torch.testing.assert_close(buffers_of(model), want[index], rtol=1e-4, atol=1e-5))


def counted_bytes() -> None:
    """One message per dtype, counted; none in a forward that DDP sends nothing in; none without the option."""
    mesh = laconic.init_mesh("cpu", nodes=2, local=1)
    sent: dict[bool, list[int]] = {}
    for on in (False, True):
        model = shard(make_model(), inner=on, root=on, mesh=mesh)
        before, sent[on] = 0, []

        def count(index: int, model: nn.Module = model, sent: list[int] = sent[on]) -> None:
            nonlocal before
            now = model.traffic.snapshot().total("node", "control", "sent" if dist.get_rank() == 0 else "received")
            sent.append(now - before)
            before = now

        before = model.traffic.snapshot().total("node", "control", "sent" if dist.get_rank() == 0 else "received")
        run(model, count)
    nbytes = sum(buffer.nbytes for buffer in make_model().buffers())
    is_due = [True, True, True, False, False, True, False, False, True]
    extra = [with_it - without for with_it, without in zip(sent[True], sent[False], strict=True)]
    assert extra == [nbytes * due for due in is_due]


def inner_units() -> None:
    """An inner unit alone covers its own buffers: the others stay as they are."""
    model = shard(make_model(), inner=True, root=False)
    own = []

    def note(index: int) -> None:
        if index == 5:  # the evaluation after a step
            own.extend(name for name, each in buffers_of(model).items() if each.is_floating_point() and differs(each))

    run(model, note)
    assert own == ["2.mean", "4.running_mean", "4.running_var"]


def differs(buffer: Tensor) -> bool:
    all_of_them = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, buffer)
    return not all(torch.equal(each, buffer) for each in all_of_them)


def as_fsdp2() -> None:
    """Without the option ranks keep their own, and the first rank says so, once."""
    model = shard(make_model(), inner=False, root=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, lambda index: None)
    said = [str(each.message) for each in caught if "broadcast_buffers" in str(each.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all(text.startswith("0.1.running_mean and 5 more buffers change in forward") for text in said)
    assert differs(model[0][1].running_mean)  # type: ignore[arg-type,index,union-attr]


def apart() -> None:
    """Islands that train on their own keep their own buffers."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    model = shard(make_model(), inner=True, root=True, mesh=mesh)
    laconic.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    run(model, lambda index: None)
    assert differs(model[0][1].running_mean)  # type: ignore[arg-type,index,union-attr]


@on_ranks(2, local=1)
def test_two_ranks() -> None:
    job_as_ddp(1, 2, 1)
    counted_bytes()
    inner_units()
    as_fsdp2()
    apart()


@pytest.mark.parametrize(("islands", "nodes", "local"), [(1, 2, 2), (2, 1, 2)])
def test_four_ranks_as_ddp(islands: int, nodes: int, local: int) -> None:
    run_ranks(job_as_ddp, 4, islands, nodes, local, local=local)
