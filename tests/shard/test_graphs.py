"""Unusual graphs: shared and unused units, several outputs, several losses, two models; against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from tests.ranks import run_ranks
from tests.shard.helpers import (
    Block,
    Net,
    assert_gradients,
    assert_nothing_gathered,
    buckets,
    build,
    full_gradients,
    gather_bytes,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    reduce_bytes,
    shard,
    squared_error,
)


class Shared(Net):
    """One block used twice in a row and once beside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.blocks[0](self.blocks[1](self.blocks[0](x)))
        return self.out(x + self.blocks[2](x) + self.blocks[2](2 * x))


class Unused(Net):
    """A block that is never used, one whose output is thrown away, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__(5)
        self.blocks[2].idle = nn.Linear(3, 3)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 2, 3):
            x = self.blocks[index](x)
        self.blocks[4](x)
        return self.out(x)


class TwoOutputs(Net):
    """Units that take and give several tensors, by keyword, in a dict, one of them straight to the loss."""

    class Pair(Block):
        def forward(self, x: Tensor, *, side: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
            h = self.up(x)
            return {
                "x": x + self.down(torch.relu(h)),
                "aux": h.square().mean() * scale,
                "side": side,
                "list": [h.detach()],
            }

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, aux = self.inp(x), torch.zeros(())
        for block in self.blocks:
            out = block(x, side=x, scale=0.1)
            x, aux = out["x"] + out["side"], aux + out["aux"]
        return self.out(x) + aux


class NoInputGradient(nn.Module):
    """Units at the beginning, whose inputs need no gradient, two of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5, 11), Block(5, 13), Block(5, 7)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks[2](self.blocks[0](x) * self.blocks[1](x)))


class Normed(Net):
    """Weights that are computed from parameters inside the unit."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)  # type: ignore[arg-type]


class NoOwnParameters(nn.Module):
    """A root that only holds units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 8), Block(8, 5), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InPlace(Net):
    """The model changes a unit's output in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x += 1
            torch.relu_(x)
        return self.out(x)


class WithoutGraph(Net):
    """A unit is used with a graph and without one in the same forward, as teachers and momentum encoders are."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            with torch.no_grad():
                target = block(x)
            x = block(x) + target
        return self.out(x)


class Nested(Net):
    """Units inside units."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared,
    "unused": Unused,
    "two_outputs": TwoOutputs,
    "no_input_gradient": NoInputGradient,
    "normed": Normed,
    "no_own_parameters": NoOwnParameters,
    "in_place": InPlace,
    "without_graph": WithoutGraph,
    "nested": Nested,
}


def job_graph(name: str, cache: str) -> None:
    model: Any = build(GRAPHS[name])
    units = list(model.blocks)
    if name == "nested":
        units = [module for block in model.blocks for module in (block.up, block.down, block)]
    shard(model, units, cache=cache)
    oracle = oracle_of(model, GRAPHS[name])
    for seed in range(3):
        batches = micro_batches(2, seed)
        for number, batch in enumerate(batches):
            model.set_requires_gradient_sync(number == 1)
            squared_error(model, batch[dist.get_rank()]).backward()
            assert_nothing_gathered(model)
        _, want = oracle.gradients(batches)
        got = full_gradients(model)
        for key, parameter in oracle.parameters().items():
            if key in want:
                torch.testing.assert_close(got[key], want[key], msg=lambda text, key=key: f"{key}: {text}")
            else:
                assert key not in got or torch.equal(got[key], torch.zeros_like(parameter)), key
        model.zero_grad()
        with torch.no_grad():  # both models change alike
            for parameter in (*model.parameters(), *oracle.parameters().values()):
                parameter.mul_(0.9)


@pytest.mark.parametrize("name", GRAPHS)
def test_unusual_graphs_have_the_oracles_gradients(name: str) -> None:
    index = list(GRAPHS).index(name)
    run_ranks(job_graph, 4, name, ("host", "none", "device")[index % 3], local=2)


def job_unused_bytes() -> None:
    """A unit that is not used costs nothing; its parameters keep no gradient."""
    model: Any = build(Unused)
    shard(model, cache="host")
    with moved(model) as m:
        squared_error(model, inputs(0, dist.get_rank())).backward()
    used = [b for i in (0, 2, 3) for b in buckets(model.blocks[i])] + model._laconic_unit.buckets
    assert m.gradients == reduce_bytes("node", used)
    assert m.weights == gather_bytes("node", used + buckets(model.blocks[4]))
    assert all(p.grad is None for i in (1, 4) for p in model.blocks[i].parameters())
    assert model.blocks[2].idle.weight.grad.full_tensor().eq(0).all()


def test_unused_units_cost_nothing() -> None:
    run_ranks(job_unused_bytes, 2, local=1)


def job_two_losses() -> None:
    """Two forwards before one backward, and a graph run backward twice."""
    model = shard(build(), cache="host")
    oracle = oracle_of(model)
    batches = micro_batches(2)
    rank = dist.get_rank()
    (squared_error(model, batches[0][rank]) + squared_error(model, batches[1][rank])).backward()
    assert_gradients(model, oracle, batches)
    assert_nothing_gathered(model)
    model.zero_grad()
    loss = squared_error(model, batches[0][rank])
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients(model, oracle, [batches[0], batches[0]])
    assert_nothing_gathered(model)


def test_two_forwards_or_two_backwards_of_one_graph() -> None:
    run_ranks(job_two_losses, 4, local=2)


def job_gradients_of_inputs() -> None:
    model, plain = shard(build()), build()
    x = inputs(0, dist.get_rank())[0]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(ours).sum().backward()
    plain(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert_nothing_gathered(model)
    (again,) = torch.autograd.grad(model(ours).sum(), ours)
    torch.testing.assert_close(again, theirs.grad)
    assert_nothing_gathered(model)


def test_inputs_get_their_gradients() -> None:
    run_ranks(job_gradients_of_inputs, 4, local=2)


def job_two_roots() -> None:
    """Two sharded models on one mesh: a teacher without a graph, then both in one loss."""
    mesh, rank = laconic.init_mesh("cpu"), dist.get_rank()
    student, teacher = shard(build(), mesh=mesh, cache="host"), shard(build(seed=1), mesh=mesh)
    assert student.traffic is teacher.traffic, "one mesh, one account"
    ranks = range(dist.get_world_size())
    for seed in range(2):
        plain_student, plain_teacher = build(), build(seed=1)
        x = inputs(seed, rank)[0]
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).square().mean().backward()
        for r in ranks:
            x = inputs(seed, r)[0]
            ((plain_student(x) - plain_teacher(x).detach()).square().mean() / len(ranks)).backward()
        for name, gradient in full_gradients(student).items():
            torch.testing.assert_close(gradient, plain_student.get_parameter(name).grad, msg=name)
        assert_nothing_gathered(student)
        assert_nothing_gathered(teacher)
        student.zero_grad()
        plain_student.zero_grad()
        x = inputs(seed, rank)[0]
        (student(x) * teacher(x)).mean().backward()
        for r in ranks:
            x = inputs(seed, r)[0]
            ((plain_student(x) * plain_teacher(x)).mean() / len(ranks)).backward()
        for model, plain in ((student, plain_student), (teacher, plain_teacher)):
            for name, gradient in full_gradients(model).items():
                torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
            assert_nothing_gathered(model)
            model.zero_grad()


def test_two_models_share_a_mesh() -> None:
    run_ranks(job_two_roots, 4, local=2)
