"""Autograd's reports to a unit: backward has reached the outputs of one of its forwards, or the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Watching(Protocol):
    """A unit that gets the reports: [Note: When a unit is done with backward] in shard/unit.py."""

    def begin_backward(self, hook: OutputGradients) -> None:
        """Backward reaches the outputs that `hook` watches."""

    def await_inputs(self, node: Any) -> None:
        """The graph has a node that will report gradients at the inputs."""

    def reach_inputs(self, node: Any) -> None:
        """Backward reaches the inputs that `node` watches."""


class OutputGradients:
    """A hook on the outputs of one forward, which runs at the first gradient. It lives as long as the graph."""

    def __init__(self, unit: Watching) -> None:
        self._unit = unit

    def __call__(self, gradient: Tensor | None) -> None:
        """Report the first gradient, which may be None."""
        self._unit.begin_backward(self)

    def follow(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as an output whose gradient, or whose tangent's gradient, runs the hook."""
        return _Followed.apply(self, tensor) if tensor.is_floating_point() else tensor


class _Followed(torch.autograd.Function):
    """The identity on an output; its backward runs a hook."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hook: OutputGradients, output: Tensor) -> Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook = inputs[0]
        ctx.set_materialize_grads(False)  # an output without a gradient has None, not zero

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.hook(gradient)
        return None, gradient

    @staticmethod
    def jvp(ctx: Any, hook: None, tangent: Tensor | None) -> Any:
        return None if tangent is None else _Followed.apply(ctx.hook, tangent)


def watch_inputs(unit: Watching, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return `inputs` as the forward shall use them, so that backward reports the arrival of their gradients."""
    return _InputGradients.apply(unit, *inputs)


class _InputGradients(torch.autograd.Function):
    """The identity on the inputs of one forward; its backward reports that gradients have reached them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: Watching, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in inputs)  # else torch would refuse to change them in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.unit = inputs[0]
        ctx.unit.await_inputs(ctx)
        ctx.set_materialize_grads(False)  # an input without a gradient has None, not zero

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.unit.reach_inputs(ctx)
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, unit: None, *tangents: Tensor) -> Any:
        return tangents
