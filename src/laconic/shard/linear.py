"""Weight gradients of linear layers, written straight into the buffer that is reduced.

[Note: Gradients written in place]
Autograd allocates every gradient. Moving a gradient into the bucket costs a second pass over memory, and for a moment
both copies exist. The gradient of a linear layer's weight is one matrix product, and a product can write its result
into given memory. So the linear layers of a unit run the function below: its backward writes the product into the
bucket and returns no gradient to autograd. All other gradients are copied when they arrive (`BucketGradients.collect`):
accumulating into a zeroed view would read and write the bucket once more. Where the product cannot be written (another
reduce dtype, a graph of the gradient, autocast, compilation), the layer takes the plain path, with the same numbers.
So it does in a backward that does not add to `.grad` of the weight, such as `autograd.grad` of an input.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic import _compat
from laconic._compat import GradientUse


class GradientSink(ABC):
    """The destination of one bucket's gradients."""

    @abstractmethod
    def accepts(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """True if `add_product` takes a product of this shape and dtype for parameter `index`.

        It takes products of two matrices only, without a cast. All others go the way of autograd's gradients.
        """

    @abstractmethod
    def collect(self, index: int, parameter: nn.Parameter) -> None:
        """Move the gradient that autograd put on gathered parameter `index`."""

    @abstractmethod
    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add left @ right, which `accepts` takes, to the gradient of parameter `index`.

        Shapes: (m, k) @ (k, n) -> (m, n).

        Raises:
            ValueError: the product has another shape than the gradient.
        """


def write_gradient_in_place(module: nn.Module) -> None:
    """Replace the forward of `module`, if it is a linear layer: [Note: Gradients written in place]."""
    if type(module).forward is nn.Linear.forward:
        module.forward = MethodType(_forward, module)


def set_sink(parameter: nn.Parameter, sink: GradientSink, index: int) -> None:
    """Set where a gathered parameter's gradient is written: parameter `index` of `sink`."""
    parameter._laconic_sink = (sink, index)  # type: ignore[attr-defined]


def sink_of(parameter: Tensor) -> tuple[GradientSink, int] | None:
    """Return the sink and index that `set_sink` set; None if it set none."""
    return getattr(parameter, "_laconic_sink", None)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    own = module._parameters  # `module.weight` takes a call of torch's
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None:  # a parametrization makes it
        return functional.linear(input, module.weight, module.bias)
    sink_of_weight = getattr(weight, "_laconic_sink", None)
    if (
        sink_of_weight is not None
        and not _compat.is_transforming()
        and weight.requires_grad
        and torch.is_grad_enabled()
        and type(input) in (Tensor, nn.Parameter)
        and input.dtype == weight.dtype
        and sink_of_weight[0].accepts(sink_of_weight[1], weight.shape, weight.dtype)
        and not torch.is_autocast_enabled(input.device.type)
    ):
        output: Tensor = _apply(input, weight, bias, *sink_of_weight)
        return output
    return functional.linear(input, weight, bias)


def use_of_gradient(ctx: Any, position: int) -> GradientUse:
    """Say what the running backward does with the gradient of a leaf: tensor `position` of a function's inputs.

    `ctx` is the function's context. The function's backward calls this.
    """
    if _compat.is_transforming():  # no backward runs yet
        return GradientUse.RETURNED
    return _compat.gradient_use(ctx.next_functions[position][0])


class LinearInPlace(torch.autograd.Function):
    """`functional.linear` that writes its weight's gradient into a sink."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, sink: GradientSink, index: int) -> Tensor:
        """See `functional.linear`; the weight is parameter `index` of `sink`."""
        ctx.save_for_backward(input, weight)
        ctx.sink, ctx.index = sink, index
        ctx.set_materialize_grads(False)  # an output without a gradient has None, not zero
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """Write the weight's gradient into the sink; return those of the input and the bias."""
        if gradient is None:
            return None, None, None, None, None
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = gradient.reshape(-1, gradient.shape[-1])
        weight_gradient = None
        use = GradientUse.UNUSED
        if needs_weight:  # see `use_of_gradient`
            is_traced = _compat.is_transforming()
            use = GradientUse.RETURNED if is_traced else _compat.gradient_use(ctx.next_functions[1][0])
        if use is not GradientUse.UNUSED:
            left, right = rows.t(), input.reshape(-1, input.shape[-1])
            if use is GradientUse.ACCUMULATED and not torch.is_grad_enabled():
                ctx.sink.add_product(ctx.index, left, right)
            else:  # with create_graph=True the gradient itself is part of a graph
                weight_gradient = left @ right
        bias_gradient = rows.sum(0) if needs_bias else None
        input_gradient = gradient @ weight if needs_input else None
        return input_gradient, weight_gradient, bias_gradient, None, None


_apply = _compat.plain_apply(LinearInPlace)
