"""Unusual graphs against the oracle: shared, unused and recomputed units, several outputs or losses, two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.shard.unit import UnitPhase, unit_of
from tests.support import sharded_net
from tests.support.launch import on_ranks, run_ranks


class Shared(sharded_net.Net):
    """One block that is used before and after another, and one that is used twice side by side."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.blocks[0](self.blocks[1](self.blocks[0](x)))
        return self.out(x + self.blocks[2](x) + self.blocks[2](2 * x))


class Unused(sharded_net.Net):
    """A block that is never used, one whose output is not used, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__(5)
        self.blocks[2].idle = nn.Linear(3, 3)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 2, 3):
            x = self.blocks[index](x)
        self.blocks[4](x)
        return self.out(x)


class TwoOutputs(sharded_net.Net):
    """Units that take tensors by keyword and return several in a dict; one goes directly to the loss."""

    class Pair(sharded_net.Block):
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
    """First units whose inputs need no gradient, two of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([sharded_net.Block(5, 11), sharded_net.Block(5, 13), sharded_net.Block(5, 7)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks[2](self.blocks[0](x) * self.blocks[1](x)))


class Normed(sharded_net.Net):
    """Weights that are computed from parameters inside the unit."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)  # type: ignore[arg-type]


class NoOwnParameters(nn.Module):
    """A root that only holds units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 8), sharded_net.Block(8, 5), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InPlace(sharded_net.Net):
    """The model changes a unit's output in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x += 1
            torch.relu_(x)
        return self.out(x)


class WithoutGraph(sharded_net.Net):
    """Each unit runs with a graph and without one in the same forward, as teachers and momentum encoders do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            with torch.no_grad():
                target = block(x)
            x = block(x) + target
        return self.out(x)


class Nested(sharded_net.Net):
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
    model: Any = sharded_net.build(GRAPHS[name])
    units = list(model.blocks)
    if name == "nested":
        units = [module for block in model.blocks for module in (block.up, block.down, block)]
    sharded_net.shard(model, units, cache=cache)
    oracle = sharded_net.oracle_of(model, GRAPHS[name])
    for seed in range(3):
        batches = sharded_net.micro_batches(2, seed)
        for number, batch in enumerate(batches):
            model.set_requires_gradient_sync(number == 1)
            sharded_net.squared_error(model, batch[dist.get_rank()]).backward()
            sharded_net.assert_nothing_gathered(model)
        _, want = oracle.gradients(batches)
        got = sharded_net.full_gradients(model)
        for key, parameter in oracle.parameters().items():
            if key in want:
                torch.testing.assert_close(got[key], want[key], msg=lambda text, key=key: f"{key}: {text}")
            else:
                assert key not in got or torch.equal(got[key], torch.zeros_like(parameter)), key
        model.zero_grad()
        with torch.no_grad():  # the same change in both models
            for parameter in (*model.parameters(), *oracle.parameters().values()):
                parameter.mul_(0.9)


@pytest.mark.heavy
@pytest.mark.parametrize("name", GRAPHS)
def test_unusual_graphs_have_the_oracles_gradients(name: str) -> None:
    index = list(GRAPHS).index(name)
    run_ranks(job_graph, 4, name, ("host", "none", "device")[index % 3], local=2)


@on_ranks(2, local=1)
def test_unused_units_send_nothing() -> None:
    """An unused unit sends nothing, and its parameters get no gradient."""
    model: Any = sharded_net.build(Unused)
    sharded_net.shard(model, cache="host")
    with sharded_net.moved(model) as m:
        sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
    used = [b for i in (0, 2, 3) for b in sharded_net.buckets(model.blocks[i])] + model._laconic_unit.buckets
    assert m.gradients == sharded_net.reduce_bytes("node", used)
    assert m.weights == sharded_net.gather_bytes("node", used + sharded_net.buckets(model.blocks[4]))
    assert all(p.grad is None for i in (1, 4) for p in model.blocks[i].parameters())
    assert model.blocks[2].idle.weight.grad is None


@on_ranks(4, local=2)
def test_two_forwards_or_two_backwards_of_one_graph() -> None:
    """Two forwards before one backward, and a graph run backward twice."""
    model = sharded_net.shard(sharded_net.build(), cache="host")
    oracle = sharded_net.oracle_of(model)
    batches = sharded_net.micro_batches(2)
    rank = dist.get_rank()
    (sharded_net.squared_error(model, batches[0][rank]) + sharded_net.squared_error(model, batches[1][rank])).backward()
    sharded_net.assert_gradients(model, oracle, batches)
    sharded_net.assert_nothing_gathered(model)
    model.zero_grad()
    loss = sharded_net.squared_error(model, batches[0][rank])
    loss.backward(retain_graph=True)
    loss.backward()
    sharded_net.assert_gradients(model, oracle, [batches[0], batches[0]])
    sharded_net.assert_nothing_gathered(model)


@on_ranks(4, local=2)
def test_inputs_get_their_gradients() -> None:
    model, plain = sharded_net.shard(sharded_net.build()), sharded_net.build()
    x = sharded_net.inputs(0, dist.get_rank())[0]
    sharded_input, plain_input = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(sharded_input).sum().backward()
    plain(plain_input).sum().backward()
    torch.testing.assert_close(sharded_input.grad, plain_input.grad)
    sharded_net.assert_nothing_gathered(model)
    (again,) = torch.autograd.grad(model(sharded_input).sum(), sharded_input)
    torch.testing.assert_close(again, plain_input.grad)
    sharded_net.assert_nothing_gathered(model)


@on_ranks(4, local=2)
def test_two_models_share_a_mesh() -> None:
    """Two sharded models on one mesh: a teacher without a graph, then both in one loss."""
    mesh, rank = laconic.init_mesh("cpu"), dist.get_rank()
    student, teacher = (
        sharded_net.shard(sharded_net.build(), mesh=mesh, cache="host"),
        sharded_net.shard(sharded_net.build(seed=1), mesh=mesh),
    )
    assert student.traffic is teacher.traffic, "one mesh has one set of counters"
    ranks = range(dist.get_world_size())
    for seed in range(2):
        plain_student, plain_teacher = sharded_net.build(), sharded_net.build(seed=1)
        x = sharded_net.inputs(seed, rank)[0]
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).square().mean().backward()
        for r in ranks:
            x = sharded_net.inputs(seed, r)[0]
            ((plain_student(x) - plain_teacher(x).detach()).square().mean() / len(ranks)).backward()
        for name, gradient in sharded_net.full_gradients(student).items():
            torch.testing.assert_close(gradient, plain_student.get_parameter(name).grad, msg=name)
        sharded_net.assert_nothing_gathered(student)
        sharded_net.assert_nothing_gathered(teacher)
        student.zero_grad()
        plain_student.zero_grad()
        x = sharded_net.inputs(seed, rank)[0]
        (student(x) * teacher(x)).mean().backward()
        for r in ranks:
            x = sharded_net.inputs(seed, r)[0]
            ((plain_student(x) * plain_teacher(x)).mean() / len(ranks)).backward()
        for model, plain in ((student, plain_student), (teacher, plain_teacher)):
            for name, gradient in sharded_net.full_gradients(model).items():
                torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)
            sharded_net.assert_nothing_gathered(model)
            model.zero_grad()


class Checkpointed(sharded_net.Net):
    """Blocks are recomputed: each in a checkpoint, or two in one, or the inside of a block."""

    def __init__(self, kind: str, reentrant: bool) -> None:
        super().__init__()
        self.kind, self.reentrant = kind, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.kind == "pair":

            def pair(h: Tensor) -> Tensor:
                return self.blocks[1](self.blocks[0](h))

            x = checkpoint(pair, x, use_reentrant=self.reentrant)
            x = self.blocks[2](x)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class InnerCheckpoint(sharded_net.Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda h: self.down(torch.relu(self.up(h))), x, use_reentrant=False)


def make_checkpointed(kind: str, reentrant: bool) -> nn.Module:
    if kind != "inner":
        return Checkpointed(kind, reentrant)
    model = sharded_net.Net()
    for block in model.blocks:
        block.__class__ = InnerCheckpoint
    return model


def job_checkpointing(cache: str, kind: str, reentrant: bool) -> None:
    model = sharded_net.shard(sharded_net.build(lambda: make_checkpointed(kind, reentrant)), cache=cache)
    reference, oracle = sharded_net.shard(sharded_net.build(), cache=cache), sharded_net.oracle_of(model)
    for seed in range(2):
        batches = sharded_net.micro_batches(2, seed)
        measured, peaks = [], []
        for net in (reference, model):
            net.reset_peak_memory()
            with sharded_net.moved(net) as m:
                for number, batch in enumerate(batches):
                    net.set_requires_gradient_sync(number == 1)
                    sharded_net.squared_error(net, batch[dist.get_rank()]).backward()
            measured.append((m.weights, m.gradients, m.sent("local", "weights"), m.sent("local", "gradients")))
            peaks.append(net.memory().device_peak_bytes)
            sharded_net.assert_nothing_gathered(net)
        assert measured[0] == measured[1], "recomputing sends no more bytes"
        assert peaks[1] <= peaks[0], "recomputing holds no more memory"
        sharded_net.assert_gradients(model, oracle, batches)
        for net in (reference, model):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0)
            net.zero_grad()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "reentrant"), [("each", False), ("each", True), ("pair", False), ("pair", True), ("inner", False)]
)
def test_activation_checkpointing_gathers_no_more_often(kind: str, reentrant: bool) -> None:
    cache = {"each": "host", "pair": "none", "inner": "device"}[kind]
    run_ranks(job_checkpointing, 4, cache, kind, reentrant, local=2)


@on_ranks(2, local=1)
def test_a_recomputed_forward_is_part_of_backward() -> None:
    model = sharded_net.shard(sharded_net.build(lambda: Checkpointed("each", False)), cache="none")
    units = [unit_of(block) for block in model.blocks]
    states: list[bool] = []
    for unit in units:
        assert unit is not None
        unit.modules[0].up.register_full_backward_hook(
            lambda *_, unit=unit: states.append(unit.phase is UnitPhase.BACKWARD)
        )  # type: ignore[union-attr, misc]
    for _ in range(2):
        states.clear()
        sharded_net.train_step(model)
        assert states == [True] * len(units), "a recomputed forward took a unit out of its backward"
        sharded_net.assert_nothing_gathered(model)
