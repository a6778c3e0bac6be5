"""Unusual graphs against the oracle: shared, unused and recomputed units, several losses, two models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_equals_oracle


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


class Normed(sharded_net.Net):
    """Weights that are computed from parameters inside the unit."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)  # type: ignore[arg-type]


GRAPHS: list[Scenario] = [
    Scenario(make=Normed, cache="device"),
    Scenario(units=[f"blocks.{i}{part}" for i in range(3) for part in (".up", ".down", "")], local=2),
]
"""Random trees (test_random_trees.py) have many more."""


@pytest.mark.parametrize("scenario", GRAPHS)
def test_unusual_graphs_train_as_in_one_process(scenario: Scenario) -> None:
    scenario = replace(scenario, micro_batches=2)
    assert_equals_oracle(scenario, scenario.run())


@on_ranks(2, local=1)
def test_unused_units_send_nothing() -> None:
    """An unused unit sends nothing, and its parameters get no gradient."""
    model = sharded_net.shard(sharded_net.build(Unused), cache="host")
    with sharded_net.moved(model) as m:
        sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
    used = [b for i in (0, 2, 3) for b in sharded_net.buckets(model.blocks[i])] + model._laconic_unit.buckets
    assert m.gradients == sharded_net.reduce_bytes("node", used)
    assert m.weights == sharded_net.gather_bytes("node", used + sharded_net.buckets(model.blocks[4]))
    assert all(p.grad is None for i in (1, 4) for p in model.blocks[i].parameters())
    assert model.blocks[2].idle.weight.grad is None


@on_ranks(4, local=2)
def test_two_models_share_a_mesh() -> None:
    """A teacher without a graph, then both in one loss."""
    mesh, batches = laconic.init_mesh("cpu"), [sharded_net.inputs(0, rank)[0] for rank in range(4)]
    plain = sharded_net.build(), sharded_net.build(seed=1)
    student = sharded_net.shard(sharded_net.build(), mesh=mesh, cache="host")
    teacher = sharded_net.shard(sharded_net.build(seed=1), mesh=mesh)
    assert student.traffic is teacher.traffic, "one mesh has one set of counters"

    def distilled(one: Any, two: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = two(x)
        return (one(x) - target).square().mean()

    for loss in (distilled, lambda one, two, x: (one(x) * two(x)).mean()):
        loss(student, teacher, batches[dist.get_rank()]).backward()
        for x in batches:
            (loss(*plain, x) / 4).backward()
        for model, whole in zip((student, teacher), plain, strict=True):
            for name, gradient in sharded_net.full_gradients(model).items():
                torch.testing.assert_close(gradient, whole.get_parameter(name).grad, msg=name)
            sharded_net.assert_nothing_gathered(model)
            model.zero_grad()
            whole.zero_grad()


class Checkpointed(sharded_net.Net):
    """Blocks are recomputed: each in a checkpoint, or two in one, or the inside of a block."""

    def __init__(self, kind: str, reentrant: bool) -> None:
        super().__init__()
        self.kind, self.reentrant = kind, reentrant
        if kind == "inner":
            for block in self.blocks:
                block.__class__ = InnerCheckpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "inner":
            return super().forward(x)
        first, second, third = self.blocks
        runs = [lambda h: second(first(h)), third] if self.kind == "pair" else list(self.blocks)
        x = self.inp(x)
        for run in runs:
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.out(x)


class InnerCheckpoint(sharded_net.Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda h: self.down(torch.relu(self.up(h))), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "reentrant", "cache"),
    [
        ("each", True, "host"),
        ("pair", False, "none"),
        ("inner", False, "device"),
    ],
)
def test_activation_checkpointing_gathers_no_more_often(kind: str, reentrant: bool, cache: str) -> None:
    scenario = Scenario(make=partial(Checkpointed, kind, reentrant), cache=cache, micro_batches=2)
    runs, (plain, _) = scenario.run(), replace(scenario, make=sharded_net.Net).run()
    assert_equals_oracle(scenario, runs)
    for step in range(scenario.steps):
        recomputed, other = runs[0].sent[step], plain.sent[step]
        assert (recomputed.weights, recomputed.gradients) == (other.weights, other.gradients)
        assert runs[0].memory[step].device_peak_bytes <= plain.memory[step].device_peak_bytes
