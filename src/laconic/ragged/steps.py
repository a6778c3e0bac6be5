"""The steps of optimizers with sharded parameters, of which several files must hear: one hook of the process.

torch has no hook that an optimizer could get when it is made. So the hook is on the steps of all optimizers, from the
first sharded parameter of the process on. It looks at the parameters once, and tells nobody of the steps of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from laconic.ragged.tensor import RaggedTensor

HOME = "_laconic_home"
"""The attribute of the parameters that `fully_shard` has replaced: their names."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """A step that an optimizer is about to take."""

    optimizer: Optimizer
    parameters: list[Tensor]
    """Those of all groups."""
    ragged: list[RaggedTensor]
    """Those that are sharded."""
    has_closure: bool
    """True if the step may compute gradients itself."""


_before: list[Callable[[OptimizerStep], None]] = []
_after: list[Callable[[Optimizer], None]] = []
_handles: list[Any] = []


def before_step(function: Callable[[OptimizerStep], None]) -> Callable[[OptimizerStep], None]:
    """Call a function before each step of an optimizer with parameters that are, or were before, sharded."""
    _before.append(function)
    return function


def after_step(function: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """Call a function after each step of any optimizer."""
    _after.append(function)
    return function


def attend_steps() -> None:
    """Hear of steps from now on: there is a sharded parameter."""
    if not _handles:
        _handles.extend((register_optimizer_step_pre_hook(_begin), register_optimizer_step_post_hook(_end)))


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    ragged = [each for each in parameters if isinstance(each, RaggedTensor)]
    if ragged or any(hasattr(each, HOME) for each in parameters):
        has_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
        step = OptimizerStep(optimizer=optimizer, parameters=parameters, ragged=ragged, has_closure=has_closure)
        for function in _before:
            function(step)


def _end(optimizer: Optimizer, *_: Any) -> None:
    for function in _after:
        function(optimizer)
