"""Gradients without loss, in fewer bits than they have: `encode` and `decode`.

[Note: Lossless gradients]
No rank holds an older version of a gradient that would say anything about the next one. Signs and mantissas of
gradients are as good as random. But the exponents of values that lie side by side are alike: they have some 2.7 bits of
entropy, in a field of eight. So each block of 256 values has a window of seven exponents, whose highest, the top, takes
a byte. A value takes

    its sign and its mantissa, as they are;
    three bits that say how far its exponent lies below the top, or that it lies outside of the window;
    a byte with the exponent, if that lies outside, as 1 to 3 % do.

The middle of the window is the mean exponent of the block, unless its highest value lies lower. A block of zeros, such
as the rows of an embedding that no token has used, takes its top alone, 0; other tops are 6 and more. So bf16 takes
11.3 bits of 16, float16 some 14 of 16 and fp32 some 27 of 32: results/lossless.json. A message that would be as
long as the values *is* the values.

    message     tops, a byte for each block | for each block that is not of zeros: the lowest byte of each value's sign
                and mantissa, of float16 their other three bits, of fp32 the lower half of each value, the codes of
                exponents, three bits each | the exponents outside of windows, a byte each

On a CPU each side is a few loops over a block, which numba compiles: codec/lossless_gradients_numba.py. On CUDA it is a
few kernels: [Note: Kernels of lossless gradients] in codec/lossless_gradients_triton.py. The host then reads no length,
and a damaged message tells nothing.

ZipCCL (arXiv 2604.27844) and NCCLZ (2605.12396) code exponents in what NCCL moves, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from laconic.codec.coding import PartCoding
from laconic.codec.kernels import coder_of
from laconic.codec.lossless import UnreadMessage

BLOCK = 256
"""The values that share a window. The last block of a message is filled up with its last value."""
OUTSIDE = 7
"""The code of an exponent outside of the window; those inside are so far below its top."""
LOWEST_TOP = OUTSIDE - 1
TYPICAL_BITS = {torch.bfloat16: 11.5, torch.float16: 14.5, torch.float32: 27.5}
"""Of a value in a message, for those who ask before it is known."""
CODED_DTYPES = tuple(TYPICAL_BITS)
_CODE_BYTES = BLOCK * 3 // 8


class GradientForm(NamedTuple):
    """Where the values of a dtype have the bits that cross as they are."""

    extra_bits: int
    """Of sign and mantissa in the upper half of a value, those above a byte."""
    tail_bytes: int
    """Of a value below its upper half."""

    @property
    def row_bytes(self) -> int:
        """The bytes of a block besides its top, and the exponents outside."""
        return self.rest_bytes + _CODE_BYTES

    @property
    def rest_bytes(self) -> int:
        """The bytes of a block's signs and mantissas."""
        return BLOCK * (1 + self.tail_bytes) + BLOCK * self.extra_bits // 8


_FORMS = {
    torch.bfloat16: GradientForm(extra_bits=0, tail_bytes=0),
    torch.float16: GradientForm(extra_bits=3, tail_bytes=0),
    torch.float32: GradientForm(extra_bits=0, tail_bytes=2),
}


def encode(values: Tensor) -> UnreadMessage:
    """Encode values, flat, of bf16, float16 or fp32: [Note: Lossless gradients].

    Returns:
        (bytes,), uint8, never longer than the values.

    Raises:
        ValueError: the values are not flat, or of another dtype.
        ModuleNotFoundError: see `coder_on`.
    """
    form, values = _form_of(values), values.contiguous()
    raw = values.view(torch.uint8)
    if not len(raw):
        return UnreadMessage.of(raw)
    coder = coder_of(values, "lossless_gradients")
    if values.is_cuda:
        return UnreadMessage(*coder.encode(form, values))
    message = coder.encode(form, values)
    return UnreadMessage.of(message if len(message) < len(raw) else raw)


def decode(message: Tensor, out: Tensor) -> None:
    """Decode what `encode` returned for as many values into `out`, (n,), of the dtype of the values.

    A message has no checksum. If it is damaged, its sizes mostly tell, but not to the kernels of an accelerator;
    otherwise other values come out.

    Raises:
        ValueError: the sizes in the message do not fit the number of values.
    """
    form = _form_of(out)
    raw = out.view(torch.uint8)
    if len(message) == len(raw):
        raw.copy_(message)
        return
    _check_sizes(-(-len(out) // BLOCK) <= len(message) < len(raw))
    fits = coder_of(out, "lossless_gradients").decode(form, message, out)
    _check_sizes(out.is_cuda or fits)


def _form_of(values: Tensor) -> GradientForm:
    if values.dtype not in _FORMS or values.ndim != 1:
        raise ValueError(
            f"values that cross without loss are flat, of {', '.join(map(str, _FORMS))}, got {values.dtype}, shape "
            f"{tuple(values.shape)}; use x.view(-1), and reduce gradients in one of these"
        )
    return _FORMS[values.dtype]


def _check_sizes(agree: bool) -> None:
    if not agree:
        raise ValueError(
            "a message of lossless gradients does not have the size that follows from its blocks: it is damaged, or "
            "ranks do not run the same program"
        )


class Exponents(PartCoding):
    """Values alone, of bf16, float16 or fp32, whose exponents take few bits: [Note: Lossless gradients]."""

    def typical_bits(self, dtype: torch.dtype) -> float:
        """See `Ulps.typical_bits`."""
        return TYPICAL_BITS[dtype]

    def encode(self, part: Tensor, base: Tensor | None = None) -> UnreadMessage:
        """Encode values, (n,)."""
        assert base is None, "receivers hold nothing"
        return encode(part)

    def decode_into(self, index: int, message: Tensor, part: Tensor, *, adds: bool = False) -> None:
        """See `PartCoding.decode_into`."""
        decode(message, part)
