"""One optimizer per stage, and the hyper-parameters that belong to each batch's gradient.

[Note: Settings belong to the gradient]
Every rule applies a batch's gradient later than the batch, and the rules differ in when. If an optimizer used the
learning rate of that later time, a new learning rate would apply to other gradients under another rule. So the
hyper-parameters of all groups are copied when a batch begins, and the gradient of the batch is applied with the copy.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cyclic.stages import as_part_of

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Settings = list[dict[str, Any]]  # hyper-parameters per group, without the parameters


class StageOptimizers(torch.optim.Optimizer):
    """The optimizers of all stages, which `make` makes, as one optimizer for learning-rate schedulers and for users.

    The runtime applies the gradients, by `apply`. `step()` only shows learning-rate schedulers that a step was taken.
    `settle` completes the updates that are under way, on all workers: `LocalSteps` calls it before islands sync.

    Raises:
        ValueError: an optimizer needs a closure, or does not hold exactly the parameters of its stage.
    """

    def __init__(
        self, make: MakeOptimizer, stages: Sequence[list[nn.Parameter]], settle: Callable[[], None] = lambda: None
    ) -> None:
        self._make, self._parameters, self.settle = make, stages, settle
        self.by_stage = [make(list(parameters)) for parameters in stages]
        for stage, (optimizer, parameters) in enumerate(zip(self.by_stage, stages, strict=True)):
            _check(optimizer, parameters, stage)
        super().__init__([group for optimizer in self.by_stage for group in optimizer.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change nothing; see the class."""

    def settings(self) -> list[Settings]:
        """A copy of the hyper-parameters, by stage and group."""
        return [
            [{key: copied(value) for key, value in group.items() if key != "params"} for group in inner.param_groups]
            for inner in self.by_stage
        ]

    def restore(self, stage: int, settings: Settings) -> None:
        """Give a stage's groups these hyper-parameters."""
        for group, saved in zip(self.by_stage[stage].param_groups, settings, strict=True):
            group.update({key: copied(value) for key, value in saved.items()})

    def apply(self, stage: int, gradients: Sequence[Tensor], settings: Settings) -> None:
        """Step a stage's optimizer with the total gradients of its parameters, and with the settings of their batch."""
        current, parameters = self.settings()[stage], self._parameters[stage]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = as_part_of(parameter, gradient)
        self.restore(stage, settings)
        try:
            self.by_stage[stage].step()
        finally:
            self.restore(stage, current)
        for parameter in parameters:
            parameter.grad = None

    def blank_state(self, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The state that a first step makes for parameters like `tensors`, with zeros in it. Overwrites `tensors`."""
        parameters = [nn.Parameter(tensor) for tensor in tensors]
        optimizer = self._make(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return [
            {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
            for p in parameters
        ]


def copied(value: Any) -> Any:
    """A clone of a tensor, or any other value itself."""
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
            f"the optimizer of stage {stage} holds {len(held)} parameters, expected exactly the {len(parameters)} that "
            "optimizer_fn was given; it must make a new optimizer from its argument"
        )
