"""The oracle of a cell: the same training in one process, without sharding, compilation or checkpointing."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.cyclic.schedule import Rule
from tests.composition.job import (
    EVERY,
    MAX_NORM,
    Net,
    batch,
    build,
    error,
    num_parts,
    num_steps,
    optimizer_of,
    stage_optimizer,
    stages_of,
)
from tests.composition.matrix import CACHES, CYCLIC, Cell
from tests.reference.cyclic import Oracle as CyclicOracle

Values = dict[str, Tensor]
KEPT = {"LoRA", "QLoRA", "scaled", "ignored", "mixed precision", "expert parallel", "context parallel"}
"""The features of a cell that change what one process computes."""


def expected(cell: Cell) -> list[Values]:
    """The parameters after training, by island."""
    kept = frozenset(cell.features & KEPT)
    exact = cell.strategy in CACHES or "replicas" in cell.strategy
    cyclic = cell.strategy in CYCLIC and "local" not in cell.strategy
    strategy = "none" if exact else "cyclic" if cyclic else cell.strategy
    return _expected(Cell(strategy, cell.optimizer, kept), num_parts(cell))


@functools.cache
def _expected(cell: Cell, parts: int) -> list[Values]:
    count = 2 if cell.strategy in ("local steps", "partial updates", "local steps around cyclic") else 1
    models = [build(cell, island) for island in range(count)]
    per_island = parts // count
    islands: list[Any] = [_Worker(cell, m) if cell.strategy in CYCLIC else _Plain(cell, m) for m in models]
    outer = _Outer(models)
    for step in range(num_steps(cell)):
        for number, island in enumerate(islands):
            island.step([batch(step, number * per_island + part) for part in range(per_island)])
        if count > 1 and (step + 1) % EVERY == 0:
            for island in islands:
                island.settle()
            outer.sync()
            for island in islands:
                island.settle()
    for island in islands:
        island.settle()
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


class _Plain:
    """One model, the mean loss of all parts, clipping and one optimizer."""

    def __init__(self, cell: Cell, model: Net) -> None:
        self.model, self.optimizer = model, optimizer_of(cell, model)
        self.is_mixed = "mixed precision" in cell.features

    def step(self, batches: list[Any]) -> None:
        for x, y in batches:
            (error(self._forward(x), y) / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward(self, x: Tensor) -> Tensor:
        if not self.is_mixed:
            return self.model(x)
        shown = self.model.named_parameters()
        rounded = {name: p.to(torch.bfloat16) for name, p in shown if type(p) is nn.Parameter and p.is_floating_point()}
        return functional_call(self.model, rounded, x.to(torch.bfloat16))

    def settle(self) -> None:
        """Nothing is under way."""


class _Worker:
    """All workers of the cyclic schedule."""

    def __init__(self, cell: Cell, model: Net) -> None:
        self.oracle = CyclicOracle(stages_of(cell, model), error, stage_optimizer(cell), Rule.named("v2", 2))

    def step(self, batches: list[Any]) -> None:
        self.oracle.step(batches)

    def settle(self) -> None:
        self.oracle.restart()


class _Outer:
    """SGD, learning rate 0.7, Nesterov momentum 0.9, on the mean difference of the islands that train a parameter.

    The momentum of slices: [Note: Outer steps of slices] in islands/outer_optimizer.py.
    """

    def __init__(self, models: list[Net]) -> None:
        self.models = models
        self.values = {name: p.detach().clone() for name, p in models[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.values.items()}

    @torch.no_grad()
    def sync(self) -> None:
        for name, value in self.values.items():
            own = [model.get_parameter(name) for model in self.models]
            trained = [value - p for p in own if p.requires_grad]
            if not trained:
                continue
            mean = torch.stack(trained).mean(0)
            beta = 0.9 * (len(trained) / len(own)) ** 0.5
            self.momentum[name] = beta * self.momentum[name] + mean
            self.values[name] = value - 0.7 * (mean + beta * self.momentum[name])
            for p in own:
                p.copy_(self.values[name])
