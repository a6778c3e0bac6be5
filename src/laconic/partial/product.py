"""Products with a sliced weight: the whole weight forward, gradients of the trained parts backward.

[Note: Whole forward, compact backward]
Forward and the gradient of the input multiply with the whole weight, which is joined for the product and then freed.
So both equal the results of the uncut layer to the bit. One product for each part would sum columns in another order,
and would round each sum in low precision. The cost is a copy of one layer's weight, twice a step. The weight's gradient
is computed for the trained parts only, with one product each. A part of the weight's outputs needs the whole input for
its gradient. A part of the weight's inputs needs only the columns of the input that it multiplies. Backward keeps
nothing for frozen parts. In a unit, [Note: Gradients written in place] of shard/linear.py holds for these products.

[Note: Saved before computed]
Activation checkpointing runs a block again, but only until all tensors that backward needs are saved. So the last
product of a block is not computed again. But autograd saves a function's tensors when the function returns. So the
function here returns an output without memory, and `Product.__call__` computes the output afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from laconic import _compat
from laconic._compat import GradientUse
from laconic.ragged.parts import SlicedParameter
from laconic.shard.linear import GradientSink, use_of_gradient

_GROUPED_ALIGNMENT_BYTES = 16  # grouped products require rows of a multiple of this size


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of an input with a sliced weight."""

    sliced: SlicedParameter
    call: Callable[[Tensor, Tensor, Any], Tensor]
    """Takes the input, the whole weight and the bias, as torch's function expects them."""
    dtype: torch.dtype
    """The dtype of the product; under autocast the parts may have another."""
    is_flipped: bool
    """True if `call` expects the parts with their last two dims exchanged."""
    is_out_in: bool
    """True if the parts have the shape (..., out, in); False for (..., in, out)."""
    sinks: tuple[tuple[GradientSink, int] | None, ...]
    """For each part, the sink of its gradient and its index in the sink; None if autograd takes the gradient."""
    offsets: Tensor | None = None
    """For a grouped product, the end of each expert's rows of the input, (experts,); otherwise None."""

    def __call__(self, input: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Multiply, differentiably. `parts` are in the order of `part_names`. Cost: two copies of the weight a step."""
        if _compat.is_transforming() or not torch.is_grad_enabled():
            return _Multiply.apply(self, True, input, bias, *parts)
        output = _Multiply.apply(self, False, input, bias, *parts)
        with torch.no_grad():
            output.data = self.forward(input, parts, bias)
        return output

    @property
    def cuts_outputs(self) -> bool:
        """True if each part has some of the outputs; False if it has some of the inputs."""
        return (self.sliced.dim_from_end == -2) == self.is_out_in

    def take(self, features: Tensor, part: int) -> Tensor:
        """Select the outputs or inputs of one part: (..., features) -> (..., features of the part)."""
        return self.sliced.take(features, part, -1)

    def forward(self, input: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Compute the product with the whole weight."""
        whole = self._join(parts)
        return self.call(input, whole.transpose(-2, -1) if self.is_flipped else whole, bias)

    def output_shape(self, input: Tensor) -> tuple[int, ...]:
        """The shape of the product."""
        sizes = self.sliced.shape[-2:]
        return (*input.shape[:-1], sizes[0] if self.is_out_in else sizes[1])

    def input_gradient(self, gradient: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Compute the gradient of the input, (..., in), from the gradient of the output, (..., out)."""
        whole = self._join(parts)
        return self._times(gradient, whole if self.is_out_in else whole.transpose(-2, -1))

    def part_gradient(
        self, index: int, part: Tensor, gradient: Tensor, input: Tensor, use: GradientUse
    ) -> Tensor | None:
        """Compute the gradient of a part, for autograd; None if nobody uses it or the part's sink has taken it.

        Shapes: `gradient` of the part's outputs, (..., out); `input` of the part, (..., in).
        """
        if use is GradientUse.UNUSED:
            return None
        if part.ndim == 2:  # all rows meet the same matrix
            gradient, input = gradient.reshape(-1, gradient.shape[-1]), input.reshape(-1, input.shape[-1])
        left, right = (gradient, input) if self.is_out_in else (input, gradient)
        left = left.transpose(-2, -1)
        sink, slot = self.sinks[index] or (None, 0)
        writes = use is GradientUse.ACCUMULATED and self.dtype == part.dtype and not _compat.is_transforming()
        if writes and sink is not None and sink.accepts(slot, (*left.shape[:-1], right.shape[-1]), part.dtype):
            sink.add_product(slot, left, right)
            return None
        if self.offsets is None:
            return (left @ right).to(part.dtype)
        padded = self._times(_pad_rows(left.t()).t(), _pad_rows(right))
        return padded[..., : left.shape[0], : right.shape[1]].to(part.dtype)

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return self.sliced.join(parts).to(self.dtype)

    def _times(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right if self.offsets is None else functional.grouped_mm(left, right, offs=self.offsets)


def _pad_rows(matrix: Tensor) -> Tensor:
    """Pad the rows of a matrix for a grouped product; the rows of a slice may be too short."""
    missing = -matrix.shape[1] % (_GROUPED_ALIGNMENT_BYTES // matrix.itemsize)
    return functional.pad(matrix, (0, missing)) if missing else matrix


class _Multiply(torch.autograd.Function):
    """A product as [Note: Whole forward, compact backward] and [Note: Saved before computed] describe."""

    @staticmethod
    def forward(
        ctx: Any, product: Product, computes: bool, input: Tensor, bias: Tensor | None, *parts: Tensor
    ) -> Tensor:
        trained = [index for index, is_needed in enumerate(ctx.needs_input_grad[-len(parts) :]) if is_needed]
        if product.cuts_outputs:
            kept = [input] if trained else []
        else:  # copies, because a view would keep the whole input
            kept = [product.take(input, index).clone() for index in trained]
        ctx.product, ctx.trained, ctx.num_kept = product, trained, len(kept)
        ctx.save_for_backward(*kept, *parts)
        if computes:
            return product.forward(input, parts, bias)
        output = input.new_empty(product.output_shape(input))
        output.untyped_storage().resize_(0)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        product: Product = ctx.product
        _, _, input_needs_gradient, bias_needs_gradient, *_ = ctx.needs_input_grad
        saved = ctx.saved_tensors
        kept, parts = saved[: ctx.num_kept], saved[ctx.num_kept :]
        part_gradients: list[Tensor | None] = [None] * len(parts)
        for position, index in enumerate(ctx.trained):
            if product.cuts_outputs:
                outputs, inputs = product.take(gradient, index), kept[0]
            else:
                outputs, inputs = gradient, kept[position]
            use = use_of_gradient(ctx, index - len(parts))
            part_gradients[index] = product.part_gradient(index, parts[index], outputs, inputs, use)
        bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0) if bias_needs_gradient else None
        input_gradient = product.input_gradient(gradient, parts) if input_needs_gradient else None
        return (None, None, input_gradient, bias_gradient, *part_gradients)
