"""`SlicedTensor`: the value that a module finds in place of a weight that was cut into parts.

[Note: Forwards of sliced modules]
Modules keep their own forward, because there are many kinds of forwards, of experts above all. Where a forward reads a
weight that was cut, it gets a `SlicedTensor`. Torch's functions leave a product with a SlicedTensor to its
`__torch_function__`, which computes a `Product`. All other functions of a sliced weight raise an error: with the whole
weight they would compute its whole gradient too, and the saving would be lost without notice. Functions of a sliced
bias compute with the whole bias.

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

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from laconic import _compat
from laconic._compat import GradientUse
from laconic.ragged.parts import SlicedParameter
from laconic.shard.linear import GradientSink, sink_of, use_of_gradient

_GROUPED_ALIGNMENT_BYTES = 16  # grouped products require rows of a multiple of this size


class SlicedTensor:
    """The parts of a parameter, with the tensor methods that forwards need. Other methods raise AttributeError."""

    def __init__(self, parts: tuple[Tensor, ...], sliced: SlicedParameter, *, is_flipped: bool = False) -> None:
        """Show `parts` as one tensor; each may be one expert's matrix. `is_flipped` exchanges the last two dims."""
        self._parts, self._sliced, self._is_flipped = parts, sliced, is_flipped

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        sizes = list(self._parts[0].shape)
        sizes[self._sliced.dim_from_end] = self._sliced.shape[self._sliced.dim]
        if self._is_flipped:
            sizes[-2], sizes[-1] = sizes[-1], sizes[-2]
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        """See `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """See `torch.Tensor.dim`."""
        return len(self.shape)

    ndim = property(dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parts."""
        return self._parts[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the parts."""
        return self._parts[0].device

    @property
    def requires_grad(self) -> bool:
        """True if a part is trained."""
        return any(part.requires_grad for part in self._parts)

    def transpose(self, dim0: int, dim1: int) -> SlicedTensor:
        """Exchange the last two dims. Raises NotImplementedError for other dims."""
        if {dim0 % self.dim(), dim1 % self.dim()} != {self.dim() - 2, self.dim() - 1}:
            raise NotImplementedError(f"{self._name} can exchange its last two dims only, not {dim0} and {dim1}")
        return SlicedTensor(self._parts, self._sliced, is_flipped=not self._is_flipped)

    def t(self) -> SlicedTensor:
        """See `torch.Tensor.t`."""
        return self.transpose(-2, -1)

    T = mT = property(t)

    def __getitem__(self, index: Any) -> Any:
        """Select experts' weights from a stack: one by a number, a stack by a vector. A bias takes any index."""
        if not self._sliced.is_factor:
            return self.whole()[index]
        if self.dim() == 3 and (type(index) is int or _is_expert_index(index)):
            return SlicedTensor(tuple(part[index] for part in self._parts), self._sliced, is_flipped=self._is_flipped)
        raise self._refusal(f"indexing with {type(index).__name__}")

    def whole(self) -> Tensor:
        """Join the parts in a new tensor. Gradients flow through it to the trained parts."""
        whole = self._sliced.join(self._parts)
        return whole.transpose(-2, -1) if self._is_flipped else whole

    def __matmul__(self, other: Any) -> Any:
        return torch.matmul(cast(Tensor, self), other)

    def __rmatmul__(self, other: Any) -> Any:
        return torch.matmul(other, cast(Tensor, self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name} is cut into slices and has no {name!r} of its own; use .whole(), or initialise, load and "
            "save inside `with laconic.unsliced(model)`, where it is one parameter again"
        )

    @property
    def _name(self) -> str:
        return f"{self._sliced.name} {tuple(self.shape)}"

    def _refusal(self, operation: str) -> NotImplementedError:
        return NotImplementedError(
            f"{operation} with the sliced weight {self._name} would compute its whole gradient. Use a product by "
            "torch.nn.functional.linear, matmul, mm, bmm, addmm or grouped_mm (transformers' experts: "
            'model.set_experts_implementation("grouped_mm") or "eager"), or give the function .whole()'
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        if product is not None:
            result = product(*args, **kwargs)
            if result is not NotImplemented:
                return result
        operands = (*args, *kwargs.values())
        for operand in operands:
            if isinstance(operand, SlicedTensor) and operand._sliced.is_factor:
                raise operand._refusal(func.__name__)
        if isinstance(operands[0], SlicedTensor) and func.__name__.endswith("_"):
            getattr(operands[0], func.__name__)  # in-place functions: __getattr__ raises, and names the remedy
        return func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})


def _is_expert_index(index: Any) -> bool:
    return isinstance(index, Tensor) and index.ndim < 2 and index.dtype in (torch.int64, torch.int32)


def _plain(value: Any) -> Any:
    return value.whole() if isinstance(value, SlicedTensor) else value


# -- products ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of an input with a sliced weight."""

    sliced: SlicedParameter
    call: Callable[[Tensor, Tensor, Any], Tensor]
    """Takes the input, the whole weight as its parts make it, and the bias."""
    dtype: torch.dtype
    """The dtype of the product; under autocast the parts may have another."""
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
            output.data = self.call(input, self.whole(parts), bias)
        return output

    @property
    def cuts_outputs(self) -> bool:
        """True if each part has some of the outputs; False if it has some of the inputs."""
        return (self.sliced.dim_from_end == -2) == self.is_out_in

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the whole weight, in the dtype of the product."""
        return self.sliced.join(parts).to(self.dtype)

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
        padded = self.times(_pad_rows(left.t()).t(), _pad_rows(right))
        return padded[..., : left.shape[0], : right.shape[1]].to(part.dtype)

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two tensors, expert by expert for a grouped product."""
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
            kept = [product.sliced.take(input, index, -1).clone() for index in trained]
        ctx.product, ctx.trained, ctx.num_kept = product, trained, len(kept)
        ctx.save_for_backward(*kept, *parts)
        if computes:
            return product.call(input, product.whole(parts), bias)
        output = input.new_empty(*input.shape[:-1], product.sliced.shape[-2 if product.is_out_in else -1])
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
                outputs, inputs = product.sliced.take(gradient, index, -1), kept[0]
            else:
                outputs, inputs = gradient, kept[position]
            use = use_of_gradient(ctx, index - len(parts))
            part_gradients[index] = product.part_gradient(index, parts[index], outputs, inputs, use)
        bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0) if bias_needs_gradient else None
        input_gradient = None
        if input_needs_gradient:
            whole = product.whole(parts)
            input_gradient = product.times(gradient, whole if product.is_out_in else whole.mT)
        return (None, None, input_gradient, bias_gradient, *part_gradients)


def _linear(input: Tensor, weight: Any, bias: Any = None) -> Any:
    return _multiply(input, weight, bias, functional.linear, ndims=(2,), takes_out_in=True)


def _matmul(input: Any, other: Any) -> Any:
    if other.dim() == 3 and input.ndim != 3:
        return NotImplemented
    if isinstance(input, SlicedTensor) and input.dim() == other.ndim == 3:  # batched_mm: one column for each weight

        def call(columns: Tensor, weight: Tensor, _: None) -> Tensor:
            return torch.bmm(weight, columns.mT).mT

        output = _multiply(other.mT, input, None, call, ndims=(3,), takes_out_in=True)
        return output if output is NotImplemented else output.mT
    return _multiply(input, other, None, lambda x, weight, _: torch.matmul(x, weight), ndims=(2, 3))


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1:
        return NotImplemented
    return _multiply(mat1, mat2, input, lambda x, weight, bias: torch.addmm(bias, x, weight), ndims=(2,))


def _grouped_mm(input: Any, weight: Any, offs: Tensor | None = None, bias: Any = None, **kwargs: Any) -> Any:
    if input.ndim != 2 or offs is None or any(value is not None for value in (bias, *kwargs.values())):
        return NotImplemented

    def call(input: Tensor, weight: Tensor, bias: None) -> Tensor:
        return functional.grouped_mm(input, weight, offs=offs)

    return _multiply(input, weight, None, call, ndims=(3,), offsets=offs)


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.bmm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    functional.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
}


def _multiply(
    input: Any,
    weight: Any,
    bias: Any,
    call: Callable[[Tensor, Tensor, Any], Tensor],
    *,
    ndims: tuple[int, ...],
    takes_out_in: bool = False,
    offsets: Tensor | None = None,
) -> Any:
    """Compute `call(input, whole weight, bias)` as a `Product`; NotImplemented if an operand does not fit a product."""
    if not isinstance(weight, SlicedTensor) or not isinstance(input, Tensor):
        return NotImplemented
    if not weight._sliced.is_factor or weight.dim() not in ndims:
        return NotImplemented
    bias, dtype, device = _plain(bias), input.dtype, input.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and offsets is None
    if autocasts and dtype.is_floating_point:
        dtype = torch.get_autocast_dtype(device)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    elif weight.dtype != dtype:
        raise ValueError(f"the input is {dtype}, but {weight._name} is {weight.dtype}; cast one, or use autocast")
    product = Product(
        sliced=weight._sliced,
        call=(lambda input, whole, bias: call(input, whole.mT, bias)) if weight._is_flipped else call,
        dtype=dtype,
        is_out_in=takes_out_in != weight._is_flipped,
        sinks=tuple(sink_of(part) for part in weight._parts),
        offsets=offsets,
    )
    return product(input, weight._parts, bias)
