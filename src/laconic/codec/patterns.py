"""Bit patterns of small floats as whole numbers in their order, and runs of bits in words: what codes of patterns need.

Every pattern has a number of its own, NaNs and both zeros included, and neighbouring values have neighbouring numbers.
So a difference of numbers counts units in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codec.fused import kept

WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class PatternForm:
    """How to read the patterns of one format."""

    bits: int
    """The bits of a pattern: 16, 8, or 4 for two patterns a byte, the first in the lower half."""
    mantissa_bits: int | None
    """The bits below the exponent. None: a pattern is a whole number without sign, of one scale."""

    def numel(self, tensor: Tensor) -> int:
        """The number of patterns in a tensor."""
        return tensor.numel() * 2 if self.bits == 4 else tensor.numel()

    def patterns(self, tensor: Tensor) -> Tensor:
        """The patterns of a flat tensor, (numel,), int16 or int8: the topmost bit, a sign, fills what is above it."""
        if self.bits == 16:
            return tensor.view(torch.int16)
        if self.mantissa_bits is None:
            return tensor.view(torch.uint8).to(torch.int16)
        narrow = tensor.view(torch.int8)
        if self.bits == 4:
            narrow = torch.stack([(narrow << 4) >> 4, narrow >> 4], dim=1).view(-1)
        return narrow

    def tensor(self, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        """The reverse of `patterns`, of any whole numbers: a flat tensor of this dtype. Bits above are left out."""
        if self.bits == 16:
            return patterns.to(torch.int16).view(dtype)
        narrow = patterns.to(torch.uint8)
        if self.bits == 4:
            low, high = narrow.view(-1, 2).unbind(1)
            narrow = (low & 15) | (high << 4)
        return narrow.view(dtype)

    def numbers(self, patterns: Tensor) -> Tensor:
        """Each pattern's place in the order of values: negative ones lie below zero, and -0.0 is -1.

        It is its own reverse: numbers become patterns.
        """
        if self.mantissa_bits is None:
            return patterns
        return patterns ^ ((patterns >> (self.bits - 1)) & (2 ** (self.bits - 1) - 1))

    def exponents(self, patterns: Tensor) -> Tensor:
        """The biased exponents. Denormals have that of the smallest normal number, since their ulp is its."""
        if self.mantissa_bits is None:
            return torch.ones_like(patterns)
        exponent_bits = self.bits - 1 - self.mantissa_bits
        return ((patterns >> self.mantissa_bits) & (2**exponent_bits - 1)).clamp_(min=1)


PLAIN_BYTES = PatternForm(bits=8, mantissa_bits=None)
"""Bytes as whole numbers, such as scales of e8m0."""
E2M1_PAIRS = PatternForm(bits=4, mantissa_bits=1)
"""Two numbers of e2m1 in each byte, as in MXFP4 and NVFP4."""
_FORMS = {
    torch.bfloat16: PatternForm(bits=16, mantissa_bits=7),
    torch.float16: PatternForm(bits=16, mantissa_bits=10),
    torch.float8_e4m3fn: PatternForm(bits=8, mantissa_bits=3),
    torch.float8_e5m2: PatternForm(bits=8, mantissa_bits=2),
    torch.float8_e8m0fnu: PLAIN_BYTES,
    torch.uint8: PLAIN_BYTES,
}


def pattern_form_of(dtype: torch.dtype) -> PatternForm:
    """The form of a dtype's patterns; of uint8 that of plain bytes.

    Raises:
        ValueError: the dtype has more than 16 bits, or is none of floats.
    """
    if dtype not in _FORMS:
        raise ValueError(
            f"differences of {dtype} are not coded without loss; use one of {', '.join(map(str, _FORMS))}: with "
            "fully_shard, gather in bf16 by mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    return _FORMS[dtype]


def bit_length(numbers: Tensor) -> Tensor:
    """The bits of whole numbers below 2**31, int32: 0 for 0, 1 for 1, 2 for 2 and 3, and so on."""
    high = numbers >> 15
    parts = torch.where(high > 0, high, numbers).to(torch.float32)  # which holds 24 bits
    length = ((parts.view(torch.int32) >> 23) - 126).clamp_(min=0)
    return length + 15 * (high > 0)


def zigzag_of(values: Tensor) -> Tensor:
    """0, 1, -1, 2, -2, ... as 0, 1, 2, 3, 4, ..."""
    return 2 * values.abs() - (values > 0).to(values.dtype)


class FieldWriter:
    """Writes fields of at most 16 bits into runs of words. No two fields overlap."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        """`num_words` is that of all runs together."""
        self._sums = torch.zeros(num_words + 1, dtype=torch.int64, device=device)
        """Of each word the fields that begin there, which end in the next one at most."""

    def write(self, values: Tensor, offsets: Tensor) -> None:
        """Write values, (f,), at these offsets in bits, (f,), int64. No value has a bit beyond its field."""
        shifted = values.to(torch.int64) << (offsets & (WORD_BITS - 1))
        self._sums.scatter_add_(0, offsets >> 5, shifted)

    def words(self) -> Tensor:
        """All words, (w,), int32."""
        whole = self._sums[:-1]
        whole[1:] += whole[:-1] >> WORD_BITS  # in place: what is carried has no carry of its own
        return whole.to(torch.int32)


def read_fields(words: Tensor, widths: Tensor | int, offsets: Tensor) -> Tensor:
    """Read fields of at most 16 bits.

    Shapes: words (w,), with two more words than the runs have; widths and offsets, in bits, (f,) -> (f,), all int32.
    """
    low = words[:-1].to(torch.int64) & 0xFFFFFFFF
    both = low | (words[1:].to(torch.int64) << WORD_BITS)
    fields = both.index_select(0, offsets >> 5) >> (offsets & (WORD_BITS - 1)).to(torch.int64)
    return fields.to(torch.int32) & ((1 << widths) - 1)


def bits_of_words(words: Tensor) -> Tensor:
    """The bits of words (w,), int32, the lowest first: (32 w,), uint8. A table is faster than shifts on a CPU."""
    octets = words.view(torch.uint8).to(torch.int32)
    return _bits_of_octets(words.device).index_select(0, octets).view(torch.uint8)


@kept
def _bits_of_octets(device: torch.device) -> Tensor:
    """The eight bits of each octet as eight bytes, in one number of 64 bits: (256,)."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return bits.to(torch.uint8).view(torch.int64).view(-1).to(device)
