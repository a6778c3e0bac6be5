"""A tensor in parts, of which some train: whole in every product, in parts for gradients, optimizers and the engine.

[Note: One product forward, a compact one backward]
Forward and the gradient of the input multiply with the whole weight, put together for the moment of the product, so
they are those of the uncut layer to the bit, whatever is cut: one product over each part would sum columns in another
order, and in low precision round in between. It costs a copy of one layer's weight, twice a step, and none of it stays.
The weight's gradient is computed for the parts that train only, one product each, from what that needs: the input for
parts that are outputs, their own columns of it for parts that are inputs. Nothing is kept for the other parts. In a
unit of the engine the product is written where it is reduced ([Note: Gradients written in place] in shard/linear.py).

[Note: Whom a module sees]
A module's own forward is left alone, since there are many, of experts above all. Where it names a weight that was cut
it finds a `SlicedTensor`, which torch asks what a product with it is. What is no product is refused for a weight,
rather than computed in full, so that no saving is lost unseen.
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
from laconic.ragged.parts import SlicedParameter
from laconic.shard.linear import GradientSink


class SlicedTensor:
    """What a module finds where a parameter was cut: [Note: Whom a module sees]."""

    def __init__(self, parts: tuple[Tensor, ...], sliced: SlicedParameter, *, is_flipped: bool = False) -> None:
        self._parts, self._sliced = parts, sliced
        self._is_flipped = is_flipped
        """The last two dims are seen the other way round than they are stored."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        sizes = list(self._parts[0].shape)
        sizes[self._sliced.dim_from_end] = self._sliced.shape[self._sliced.dim]
        if self._is_flipped:
            sizes[-2:] = sizes[:-3:-1]
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.shape)

    ndim = property(dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parts."""
        return self._parts[0].dtype

    @property
    def device(self) -> torch.device:
        """Of the parts."""
        return self._parts[0].device

    @property
    def requires_grad(self) -> bool:
        """True if a part trains."""
        return any(part.requires_grad for part in self._parts)

    def transpose(self, dim0: int, dim1: int) -> SlicedTensor:
        """The last two dims exchanged."""
        if {dim0 % self.dim(), dim1 % self.dim()} != {self.dim() - 2, self.dim() - 1}:
            raise NotImplementedError(
                f"only the last two dims of {self._name} can be transposed, not {dim0} and {dim1}"
            )
        return SlicedTensor(self._parts, self._sliced, is_flipped=not self._is_flipped)

    def t(self) -> SlicedTensor:
        """The matrix transposed."""
        return self.transpose(-2, -1)

    T = mT = property(t)

    def __getitem__(self, index: Any) -> Any:
        """An expert's weight; anything of a bias."""
        if not self._sliced.is_factor:
            return self.whole()[index]
        is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and not index.is_complex())
        if self.dim() == 3 and is_one and getattr(index, "dtype", None) is not torch.bool:
            return SlicedTensor(tuple(part[index] for part in self._parts), self._sliced, is_flipped=self._is_flipped)
        raise self._refusal(f"indexing with {type(index).__name__}")

    def whole(self) -> Tensor:
        """All of it, a new tensor, through which gradients reach the parts that train."""
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
            f"{operation} with the sliced weight {self._name} would compute the gradient of all of it. Products are "
            "known by torch.nn.functional.linear, matmul, mm, bmm, addmm and grouped_mm (transformers' experts: "
            'model.set_experts_implementation("grouped_mm") or "eager"); others can call .whole() themselves'
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
            getattr(operands[0], func.__name__)  # says that it cannot be changed, and where it can
        return func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})


def _plain(value: Any) -> Any:
    return value.whole() if isinstance(value, SlicedTensor) else value


# -- products ----------------------------------------------------------------------------------------------------------


def _linear(input: Tensor, weight: Any, bias: Any = None) -> Any:
    if not _is_factor(weight, ndims=(2,)):
        return NotImplemented
    return _multiply(input, weight, bias, functional.linear, takes_out_in=True)


def _matmul(input: Any, other: Any) -> Any:
    if not _is_factor(other, ndims=(2, 3)) or not isinstance(input, Tensor) or (other.dim() == 3 and input.ndim != 3):
        return NotImplemented
    return _multiply(input, other, None, lambda x, weight, _: torch.matmul(x, weight), takes_out_in=False)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if not _is_factor(mat2, ndims=(2,)) or not isinstance(mat1, Tensor) or beta != 1 or alpha != 1:
        return NotImplemented
    return _multiply(mat1, mat2, input, _biased_first, takes_out_in=False)


def _grouped_mm(input: Any, weight: Any, offs: Tensor | None = None, bias: Any = None, **kwargs: Any) -> Any:
    if not _is_factor(weight, ndims=(3,)) or not isinstance(input, Tensor) or input.ndim != 2 or offs is None:
        return NotImplemented
    if bias is not None or any(value is not None for value in kwargs.values()):
        return NotImplemented

    def call(input: Tensor, weight: Tensor, bias: None) -> Tensor:
        return functional.grouped_mm(input, weight, offs=offs)

    return _multiply(input, weight, None, call, takes_out_in=False, offsets=offs)


def _biased_first(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, input, weight)


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


def _is_factor(weight: Any, ndims: tuple[int, ...]) -> bool:
    return isinstance(weight, SlicedTensor) and weight._sliced.is_factor and weight.dim() in ndims


def _multiply(
    input: Tensor,
    weight: SlicedTensor,
    bias: Any,
    call: Callable[[Tensor, Tensor, Any], Tensor],
    *,
    takes_out_in: bool,
    offsets: Tensor | None = None,
) -> Tensor:
    """`call(input, whole weight, bias)` with the backward of [Note: One product forward, a compact one backward]."""
    bias = _plain(bias)
    dtype = input.dtype
    device = input.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and offsets is None
    if autocasts and dtype.is_floating_point:
        dtype = torch.get_autocast_dtype(device)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    elif weight.dtype != dtype:
        raise ValueError(f"the input is {dtype}, but {weight._name} is {weight.dtype}; cast one, or use autocast")
    product = _Product(
        sliced=weight._sliced,
        call=call,
        dtype=dtype,
        offsets=offsets,
        is_batch=weight.dim() == 3 and offsets is None,
        is_flipped=weight._is_flipped,
        is_out_in=takes_out_in != weight._is_flipped,
        sinks=tuple(getattr(part, "_laconic_sink", None) for part in weight._parts),
    )
    if _compat.is_transforming() or not torch.is_grad_enabled():
        return _Multiply.apply(product, True, input, bias, *weight._parts)
    output = _Multiply.apply(product, False, input, bias, *weight._parts)
    with torch.no_grad():
        output.data = product.forward(input, weight._parts, bias)
    return output


@dataclass(frozen=True, kw_only=True)
class _Product:
    """What a module does with an input and a weight."""

    sliced: SlicedParameter
    call: Callable[[Tensor, Tensor, Any], Tensor]
    dtype: torch.dtype
    """The product's; the parts' may be another, under autocast."""
    offsets: Tensor | None
    """Where the rows of the input end that belong to each expert; None: all rows meet the same weight."""
    is_batch: bool
    """Each matrix of the input meets its own of the weight."""
    is_flipped: bool
    is_out_in: bool
    """How the parts are stored: (..., out, in) or (..., in, out)."""
    sinks: tuple[tuple[GradientSink, int] | None, ...]
    """Where the engine wants the parts' gradients."""

    @property
    def cuts_outputs(self) -> bool:
        return (self.sliced.dim_from_end == -2) == self.is_out_in

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return self.sliced.join(parts).to(self.dtype)

    def take(self, features: Tensor, part: int) -> Tensor:
        """A part's outputs or inputs, (..., features of the part)."""
        return self.sliced.take(features, part, -1)

    def forward(self, input: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        whole = self.whole(parts)
        return self.call(input, whole.transpose(-2, -1) if self.is_flipped else whole, bias)

    def shape_of_output(self, input: Tensor) -> tuple[int, ...]:
        sizes = self.sliced.shape[-2:]
        return (*input.shape[:-1], sizes[0] if self.is_out_in else sizes[1])

    def of_input(self, gradient: Tensor, parts: Sequence[Tensor]) -> Tensor:
        whole = self.whole(parts)
        return self._times(gradient, whole if self.is_out_in else whole.transpose(-2, -1))

    def factors_of_part(self, gradient: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        """A left and a right factor, whose product is the gradient of a part, as it is stored."""
        if not self.is_batch:
            gradient, input = gradient.reshape(-1, gradient.shape[-1]), input.reshape(-1, input.shape[-1])
        left, right = (gradient, input) if self.is_out_in else (input, gradient)
        return left.transpose(-2, -1), right

    def of_part(self, index: int, part: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """A part's gradient, for autograd to accumulate; None if it was written where the engine reduces it."""
        sink, slot = self.sinks[index] or (None, 0)
        if sink is not None and self.dtype == part.dtype and sink.takes(part.dtype) and not _compat.is_transforming():
            sink.add_product(slot, left, right)
            return None
        if self.offsets is None:
            return (left @ right).to(part.dtype)
        padded = self._times(_pad_rows(left.t()).t(), _pad_rows(right))
        return padded[..., : left.shape[0], : right.shape[1]].to(part.dtype)

    def _times(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right if self.offsets is None else functional.grouped_mm(left, right, offs=self.offsets)


def _pad_rows(matrix: Tensor) -> Tensor:
    """A matrix whose rows are a multiple of 16 bytes, as grouped products want them: a slice may have fewer."""
    missing = -matrix.shape[1] % (16 // matrix.itemsize)
    return functional.pad(matrix, (0, missing)) if missing else matrix


class _Multiply(torch.autograd.Function):
    """[Note: One product forward, a compact one backward].

    [Note: Kept before computed]
    Activation checkpointing runs a block again until everything has been kept that backward needs, and no further, so
    that the product a block ends with is not computed again. But autograd keeps what a function saves when the function
    returns. So this one returns an output without memory, which its caller computes then.
    """

    @staticmethod
    def forward(
        ctx: Any, product: _Product, computes: bool, input: Tensor, bias: Tensor | None, *parts: Tensor
    ) -> Tensor:
        trained = [index for index in range(len(parts)) if ctx.needs_input_grad[4 + index]]
        if product.cuts_outputs:
            kept = [input] if trained else []
        else:  # copies: a view would keep all of the input
            kept = [product.take(input, index).clone() for index in trained]
        ctx.product, ctx.trained, ctx.num_kept = product, trained, len(kept)
        ctx.save_for_backward(*kept, *parts)
        if computes:
            return product.forward(input, parts, bias)
        output = input.new_empty(product.shape_of_output(input))
        output.untyped_storage().resize_(0)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        product: _Product = ctx.product
        saved = ctx.saved_tensors
        kept, parts = saved[: ctx.num_kept], saved[ctx.num_kept :]
        of_parts: list[Tensor | None] = [None] * len(parts)
        for position, index in enumerate(ctx.trained):
            if product.cuts_outputs:
                factors = product.factors_of_part(product.take(gradient, index), kept[0])
            else:
                factors = product.factors_of_part(gradient, kept[position])
            of_parts[index] = product.of_part(index, parts[index], *factors)
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
        of_input = product.of_input(gradient, parts) if ctx.needs_input_grad[2] else None
        return (None, None, of_input, of_bias, *of_parts)
