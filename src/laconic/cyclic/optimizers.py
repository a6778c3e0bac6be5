"""One optimizer per stage, and the hyper-parameters that belong to each batch's gradient.

[Note: Settings belong to the gradient]
A gradient is applied on different time steps under different rules, and later than the batch it came from. Were it
applied with the learning rate of that later moment, workers would drift apart at every change. So the settings of all
groups are copied when a batch begins, and its gradient is applied with that copy, whenever that is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Settings = list[dict[str, Any]]
"""Hyper-parameters per group, without the parameters."""


class StageOptimizers(torch.optim.Optimizer):
    """The optimizers of all stages, for learning-rate schedulers and for a user's hand: one list of groups.

    Its `step()` applies nothing: gradients are applied by the schedule. It only lets schedulers see that steps are
    taken.

    Raises: ValueError for an optimizer that calls the model again, or has no parameters of the stage.
    """

    def __init__(self, make: MakeOptimizer, stages: Sequence[list[nn.Parameter]]) -> None:
        self.by_stage = [make(list(parameters)) for parameters in stages]
        for stage, (optimizer, parameters) in enumerate(zip(self.by_stage, stages, strict=True)):
            _check(optimizer, parameters, stage)
        super().__init__([group for optimizer in self.by_stage for group in optimizer.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: see the class."""

    def settings(self) -> list[Settings]:
        """A copy of all groups' hyper-parameters, by stage."""
        return [
            [{key: _copied(value) for key, value in group.items() if key != "params"} for group in inner.param_groups]
            for inner in self.by_stage
        ]

    def restore(self, stage: int, settings: Settings) -> None:
        """Give a stage's groups these hyper-parameters."""
        for group, saved in zip(self.by_stage[stage].param_groups, settings, strict=True):
            group.update({key: _copied(value) for key, value in saved.items()})

    def apply(
        self, stage: int, gradients: Sequence[Tensor], parameters: list[nn.Parameter], settings: Settings
    ) -> None:
        """Step a stage with the total gradient and the settings of its batch."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with self._bound(stage, settings):
            self.by_stage[stage].step()
        for parameter in parameters:
            parameter.grad = None

    @contextmanager
    def _bound(self, stage: int, settings: Settings) -> Iterator[None]:
        now = self.settings()[stage]
        self.restore(stage, settings)
        try:
            yield
        finally:
            self.restore(stage, now)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _check(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], stage: int) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the whole model within a step, but stages are updated one by one, "
            "at different times; use an optimizer whose step() needs gradients only"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer of stage {stage} holds {len(held)} parameters that are not just the {len(parameters)} it "
            "was given; optimizer_fn must make a new optimizer of exactly its argument"
        )
