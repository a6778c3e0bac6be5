"""Local steps in one process, and islands that come and go: every formula in plain sight."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Islands:
    """DiLoCo (arXiv 2311.08105) on `count` copies of a model; streamed by fragments (arXiv 2501.18512).

    With partial updates, island i trains the parameters for which `trains(name, i)` is true. A parameter that some
    islands do not train is averaged over those that train it, and moves by the learning rate and the momentum of
    `sliced`, a function of the number of these islands and of all.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        make_inner: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        every: int,
        fragments: dict[str, int],
        overlap: int = 0,
        mixing: float = 0.0,
        lr: float = 0.7,
        momentum: float = 0.9,
        code: Callable[[Tensor], Tensor] = lambda x: x,
        last_code: Callable[[Tensor], Tensor] | None = None,
        total_steps: int = 0,
        feedback: float = 0.0,
        trains: Callable[[str, int], bool] = lambda name, island: True,
        sliced: Callable[[int, int], tuple[float, float]] = lambda held, count: (0.7, 0.9),
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.holders = {name: [i for i in range(count) if trains(name, i)] for name, _ in model.named_parameters()}
        for island, own in enumerate(self.models):
            for name, parameter in own.named_parameters():
                parameter.requires_grad_(island in self.holders[name])
        self.inner = [make_inner(own) for own in self.models]
        self.outer = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.every, self.fragments, self.overlap, self.mixing = every, fragments, overlap, mixing
        numbers = {name: len(held) for name, held in self.holders.items()}
        self.rates = {name: (lr, momentum) if n == count else sliced(n, count) for name, n in numbers.items()}
        self.code, self.feedback, self.last_code, self.total_steps = code, feedback, last_code, total_steps
        self.lost = [{name: torch.zeros_like(value) for name, value in self.outer.items()} for _ in range(count)]
        self.step_number = 0
        self.sent: dict[int, dict[str, Tensor]] = {}
        """The means in flight, by the step after which they are applied, and by parameter."""

    def step(self, losses: Callable[[nn.Module, int], Tensor]) -> None:
        """Take an inner step of every island on `losses(model, island)`, then send and apply as the schedule says."""
        for island, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            losses(model, island).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.step_number += 1
        t, count = self.step_number, max(self.fragments.values()) + 1
        interval = self.every // count
        with torch.no_grad():
            if t % interval == 0:
                due = [n for n, home in self.fragments.items() if home == t // interval % count and self.holders[n]]
                self.sent[t + self.overlap] = {name: self._mean(name) for name in due}
            for name, mean in self.sent.pop(t, {}).items():
                lr, beta = self.rates[name]
                self.momentum[name] = beta * self.momentum[name] + mean
                self.outer[name] = self.outer[name] - lr * (mean + beta * self.momentum[name])
                for model in self.models:
                    own = model.get_parameter(name)
                    own.copy_(self.mixing * own + (1 - self.mixing) * self.outer[name])

    def _mean(self, name: str) -> Tensor:
        is_last = self.last_code is not None and self.step_number + self.every > self.total_steps
        code = self.last_code if self.last_code is not None and is_last else self.code
        arrived = []
        for island in self.holders[name]:
            message = self.outer[name] - self.models[island].get_parameter(name)
            message = message + self.feedback * self.lost[island][name]
            arrived.append(code(message))
            self.lost[island][name] = message - arrived[-1]
        return code(torch.stack(arrived).sum(0) / len(arrived))


# -- membership --------------------------------------------------------------------------------------------------------


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
