"""Islands that come and go, in one process: DiLoCo with a list of members and weights by tokens, in plain sight."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


class ChangingIslands:
    """DiLoCo (arXiv 2311.08105) on one copy of a model for each member; all parameters sync every `every` steps."""

    def __init__(
        self, model: nn.Module, make_inner: Callable[[nn.Module], torch.optim.Optimizer], *, every: int
    ) -> None:
        self.model, self.make_inner, self.every = model, make_inner, every
        self.outer = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.members: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self.steps = 0

    def come(self, number: int) -> None:
        """Let an island begin from the outer parameters, without inner optimizer state."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, value in self.outer.items():
                model.get_parameter(name).copy_(value)
        self.members[number] = model, self.make_inner(model)

    def step(self, loss: Callable[[nn.Module, int], Tensor], tokens: Callable[[int], int]) -> None:
        """Take an inner step of every member on `loss(model, number)`, and sync if it is due."""
        for number, (model, optimizer) in self.members.items():
            loss(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        if self.steps % self.every:
            return
        weights = {number: tokens(number) / sum(map(tokens, self.members)) for number in self.members}
        with torch.no_grad():
            for name, outer in self.outer.items():
                mean = torch.zeros_like(outer)
                for number, (model, _) in self.members.items():
                    mean += weights[number] * (outer - model.get_parameter(name))
                self.momentum[name] = 0.9 * self.momentum[name] + mean
                self.outer[name] = outer - 0.7 * (mean + 0.9 * self.momentum[name])
                for model, _ in self.members.values():
                    model.get_parameter(name).copy_(self.outer[name])
