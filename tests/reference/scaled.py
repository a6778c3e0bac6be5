"""The oracle of scaled formats: every block of a matrix rounded on its own, in the plainest way, in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

E4M3 = sorted({value for m in range(16) for e in range(-9, 6) if (value := m * 2.0**e) <= 448})
"""The magnitudes of e4m3, ascending: an even index is an even code."""
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The magnitudes of e2m1, ascending."""
BLOCKS = {
    "fp8_128x128": (128, 128),
    "fp8_1x128": (1, 128),
    "fp8_1x128_e8m0": (1, 128),
    "mxfp8": (1, 32),
    "nvfp4": (1, 16),
}


def rounded(matrix: Tensor, weight_format: str, *, by_rows: bool = False) -> Tensor:
    """The matrix as a format shows it, fp32. With `by_rows` blocks have one row, as those of an input."""
    matrix = matrix.detach().float()
    of_all = matrix.abs().max().clamp(min=1e-12) / (448 * 6) if weight_format == "nvfp4" else None
    height, width = BLOCKS[weight_format]
    height = 1 if by_rows else height
    columns = []
    for part in matrix.split(width, 1):
        bands = part.abs().amax(1).split(height)  # the largest of each row, by bands of blocks
        largest = torch.cat([band.max().expand(len(band)) for band in bands])
        columns.append(_blocks(part, largest[:, None], weight_format, of_all))
    return torch.cat(columns, 1)


def _blocks(block: Tensor, largest: Tensor, weight_format: str, of_all: Tensor | None) -> Tensor:
    """Round the blocks of some columns; `largest` has the largest magnitude of each row's block, (rows, 1)."""
    if of_all is not None:
        scale = nearest((largest / 6 / of_all).clamp(2.0**-6, 448), E4M3)
        return nearest(block * (of_all.reciprocal() / scale), E2M1) * (scale * of_all)
    scale = largest.clamp(min=1e-12) / 448
    if weight_format in ("mxfp8", "fp8_1x128_e8m0"):
        scale = torch.tensor([[2.0 ** math.ceil(math.log2(each))] for each in scale.flatten().tolist()])
    return nearest(block / scale, E4M3) * scale


def nearest(values: Tensor, magnitudes: list[float]) -> Tensor:
    """Round to the nearest magnitude; a tie takes the one with an even index."""
    known = torch.tensor(magnitudes, dtype=torch.float64)
    distance = (values.abs().double()[..., None] - known).abs()
    ties = distance == distance.min(-1, keepdim=True).values
    odd = torch.arange(len(known)) % 2
    index = (ties * (2 - odd)).argmax(-1)
    return known[index].float().copysign(values)


class _Multiply(torch.autograd.Function):
    """input @ weight.T + bias of rounded numbers, whose gradients are those of the exact input and rounded weight."""

    @staticmethod
    def forward(ctx, input, weight, shown, shown_input, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(input, shown)
        ctx.has_bias = bias is not None
        return functional.linear(shown_input, shown, bias)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        input, shown = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        weight = rows.t() @ input.reshape(-1, input.shape[-1])
        return gradient @ shown, weight, None, None, rows.sum(0) if ctx.has_bias else None


class RoundedLinear(nn.Linear):
    """A linear layer that rounds its whole weight, and its input, in every forward."""

    weight_format: str
    rounds_input = True
    round: Callable[..., Tensor] = staticmethod(rounded)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.round(self.weight, self.weight_format).to(input.dtype)
        shown = input.detach()
        if self.rounds_input:
            shown = self.round(shown.reshape(-1, shown.shape[-1]), self.weight_format, by_rows=True)
            shown = shown.to(input.dtype).view(input.shape)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return _Multiply.apply(input, self.weight.to(input.dtype), weight, shown, bias)


def rounding(model: nn.Module, weight_format: str, names: list[str], *, rounds_input: bool = True) -> nn.Module:
    """Let the named linear layers of a model round, in place."""
    for name in names:
        layer = model.get_submodule(name)
        layer.__class__ = RoundedLinear
        layer.weight_format, layer.rounds_input = weight_format, rounds_input  # type: ignore[assignment]
    return model


class _Same:
    """A tensor, which is equal to another if it has the same bits."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._key = tensor, (tensor.shape, tensor.contiguous().numpy().tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=256)
def _rounded_once(matrix: _Same, weight_format: str, *, by_rows: bool = False) -> Tensor:
    """See `rounded`, which takes long: ranks of one process and batches of one step ask for the same."""
    return rounded(matrix.tensor, weight_format, by_rows=by_rows)


def stack_products(
    inputs: list[Tensor], stack: Tensor, weight_format: str, *, together: bool, by_columns: bool = False
) -> list[Tensor]:
    """Each input, (k, n), times its matrix of a rounded stack, (e, m, n): (k, m) each.

    NVFP4 rounds all inputs by the largest number of each, or by that of all `together`. Matrices that are multiplied
    `by_columns`, (e, n, m), have their blocks along these.
    """
    matrices = stack.transpose(1, 2) if by_columns else stack
    weights = torch.stack([_rounded_once(_Same(matrix.detach()), weight_format) for matrix in matrices])
    if together:
        joined = _Same(torch.cat(inputs).detach())
        shown = _rounded_once(joined, weight_format, by_rows=True).split([len(each) for each in inputs])
    else:
        each = [_Same(rows.detach()) for rows in inputs]
        shown = [_rounded_once(it, weight_format, by_rows=True) if len(it.tensor) else it.tensor for it in each]
    products = zip(inputs, matrices, weights.to(stack.dtype), shown, strict=True)
    return [_Multiply.apply(rows, matrix, weight, seen.to(rows.dtype), None) for rows, matrix, weight, seen in products]
