"""Weight gradients of linear layers, computed where they are reduced.

[Note: Gradients written in place]
Autograd allocates every gradient and hands it over; moving it into the bucket costs a second pass over memory, and the
two exist side by side. The gradient of a linear layer's weight is one matrix product, and a product can be told where
to write. So the linear layers of a unit run the function below, whose backward writes into the bucket and gives
autograd nothing to accumulate. All other gradients are copied in as they arrive (`BucketGradients.collect`): autograd
has no way to say where they shall go, and accumulating into a zeroed view of the bucket would read and write it once
more. Where the product cannot be written (another reduce dtype, a graph of the gradient, autocast, compilation) the
plain path is taken, with the same numbers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic import _compat


class GradientSink(Protocol):
    """Where a bucket's gradients go."""

    def takes(self, dtype: torch.dtype) -> bool:
        """True if products of `dtype` can be written without a cast."""

    def collect(self, index: int, parameter: nn.Parameter) -> None:
        """Take a gradient that autograd has put on a gathered parameter."""

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add left @ right, (m, k) @ (k, n), to the gradient of parameter `index`, (m, n)."""


def write_gradient_in_place(module: nn.Module) -> None:
    """Have `module`, if it is a linear layer, follow [Note: Gradients written in place]."""
    if type(module).forward is nn.Linear.forward:
        module.forward = MethodType(_forward, module)


def mark(parameter: nn.Parameter, sink: GradientSink, index: int) -> None:
    """Say where the gradient of a gathered parameter belongs."""
    parameter._laconic_sink = (sink, index)  # type: ignore[attr-defined]


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    weight = module.weight
    if not _compat.is_transforming():
        sink, index = getattr(weight, "_laconic_sink", (None, 0))
        if sink is not None and _is_plain(input, weight, sink):
            return _Linear.apply(input, weight, module.bias, sink, index)
    return functional.linear(input, weight, module.bias)


def _is_plain(input: Tensor, weight: Tensor, sink: GradientSink) -> bool:
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and type(input) in (Tensor, nn.Parameter)
        and input.dtype == weight.dtype
        and sink.takes(weight.dtype)
        and not torch.is_autocast_enabled(input.device.type)
    )


class _Linear(torch.autograd.Function):
    """`functional.linear`, whose weight's gradient goes to a sink."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, sink: GradientSink, index: int) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.sink, ctx.index = sink, index
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = None
        if needs_weight:
            left, right = rows.t(), input.reshape(-1, input.shape[-1])
            if torch.is_grad_enabled():  # create_graph=True: the gradient is part of a graph itself
                of_weight = left @ right
            else:
                ctx.sink.add_product(ctx.index, left, right)
        of_bias = rows.sum(0) if needs_bias else None
        of_input = gradient @ weight if needs_input else None
        return of_input, of_weight, of_bias, None, None
