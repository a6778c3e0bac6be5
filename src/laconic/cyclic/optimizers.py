"""One optimizer per stage, and the hyper-parameters that belong to each batch's gradient; loss scaling.

[Note: Settings belong to the gradient]
Every rule applies a batch's gradient later than the batch, and the rules differ in when. If an optimizer used the
learning rate of that later time, a new learning rate would apply to other gradients under another rule. So the
hyper-parameters of all groups are copied when a batch begins, and the gradient of the batch is applied with the copy.

[Note: Two batches late]
A batch's gradient has overflowed if its global norm is not finite. Then the update is skipped. The norm is known when
the last total of the batch is complete. Under a staggered rule the first workers have begun the next batch by then. So
the scale of batch t depends on the batches up to t - 2. All devices receive the norm, so all compute the same scale.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEPT_BATCHES = 4  # scales, settings and norms of this many batches are kept


class BatchLossScale:
    """The loss scale of every batch, by the rule and the settings of a `torch.amp.GradScaler`."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scale, self.good_batches = scaler.get_scale(), 0
        """The scale now, and the number of batches in a row that have not overflowed."""
        self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self._interval = scaler.get_growth_interval()
        self.by_batch: dict[int, float] = {}  # the scales of the latest batches

    def begin(self, batch: int) -> None:
        """Record that a batch uses the current scale."""
        self.by_batch[batch] = self.scale
        self.by_batch.pop(batch - KEPT_BATCHES, None)

    def update(self, square: Tensor) -> None:
        """Change the scale as the sum of squares of a batch's gradient asks for; call it once per batch, in order."""
        self.scale, self.good_batches = self.after(square)

    def after(self, square: Tensor) -> tuple[float, int]:
        """The values that `update` would give to `scale` and `good_batches`."""
        if not torch.isfinite(square):
            return self.scale * self._backoff, 0
        if self.good_batches + 1 == self._interval:
            return self.scale * self._growth, 0
        return self.scale, self.good_batches + 1


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
            parameter.grad = gradient
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
