"""Small stages for many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor, nn

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule
from tests.reference.cyclic import Oracle

WIDTH = 6
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


class First(nn.Module):
    """Returns hidden states, a mask that requires no gradient, and a skip connection that requires one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(3))  # no batch uses it

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden.tanh(), hidden > 0, hidden * scale


class Middle(nn.Module):
    """Has parameters with an odd number of elements, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.frozen(hidden + self.down(self.up(hidden).relu()))
        return hidden * mask, mask, skip


class Last(nn.Module):
    """Returns one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor, mask: Tensor, skip: Tensor) -> Tensor:
        return self.linear(hidden + skip)


class Alone(nn.Module):
    """The only stage of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x * scale)


def make_stages(count: int, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Alone()] if count == 1 else [First(), *(Middle() for _ in range(count - 2)), Last()]


def make_batch(count: int, step: int, rows: int = 4) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The micro-batches of all workers."""
    generator = torch.Generator().manual_seed(step)
    return [
        (
            (torch.randn(rows, WIDTH, generator=generator), torch.full((1,), 0.5 + worker)),
            torch.randint(3, (rows,), generator=generator),
        )
        for worker in range(count)
    ]


def learning_rate(step: int) -> float:
    return 0.1 if step < 2 else 0.01 / (step + 1)


def values(stages: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            yield f"{number}.{name}", parameter.detach()


def make_oracle(count: int, rule: Rule, optimizer: str, max_grad_norm: float | None = None) -> Oracle:
    return Oracle(make_stages(count), nn.functional.cross_entropy, OPTIMIZERS[optimizer], rule, max_grad_norm)


def train(run: CyclicDataParallel, steps: range, worker: int | None) -> list[Tensor | None]:
    losses = []
    for step in steps:
        run.set_hyperparameters(lr=learning_rate(step))
        batch = make_batch(len(run.stages), step)
        losses.append(run.step(batch if worker is None else batch[worker]))
    return losses


def train_oracle(oracle: Oracle, steps: range) -> list[list[Tensor]]:
    losses = []
    for step in steps:
        oracle.set(lr=learning_rate(step))
        losses.append(oracle.step(make_batch(len(oracle.stages), step)))
    return losses


def assert_equal(run: CyclicDataParallel, oracle: Oracle, case: str) -> None:
    for (name, got), (_, want) in zip(values(run.stages), values(oracle.stages), strict=True):
        assert torch.equal(got, want), f"{case}: {name} differs by {(got - want).abs().max()}"


def cases(rules: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(product(rules, OPTIMIZERS))
