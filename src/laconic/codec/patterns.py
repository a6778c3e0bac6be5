"""Bit patterns of small floats as whole numbers.

[Note: Numbers in the order of values]
Coders give every pattern a number of its own, NaNs and both zeros included, and neighbouring values have neighbouring
numbers: negative ones lie below zero, and -0.0 is -1. So a difference of numbers counts units in the last place. The
way from a pattern to its number is its own reverse. Denormals have the exponent of the smallest normal number, since
their ulp is its.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PatternForm:
    """How to read the patterns of one format."""

    bits: int
    """The bits of a pattern: 16 or 8."""
    mantissa_bits: int | None
    """The bits below the exponent. None: a pattern is a whole number without sign, of one scale."""

    def patterns(self, tensor: Tensor) -> Tensor:
        """The patterns of a flat tensor, (n,), int16: the topmost bit, if it is a sign, fills what is above it."""
        narrow = {16: torch.int16, 8: torch.uint8 if self.mantissa_bits is None else torch.int8}[self.bits]
        return tensor.view(narrow).to(torch.int16)

    def tensor(self, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        """The reverse of `patterns`: a flat tensor of this dtype. Bits above are left out."""
        return (patterns if self.bits == 16 else patterns.to(torch.uint8)).view(dtype)


PLAIN_BYTES = PatternForm(bits=8, mantissa_bits=None)
"""Bytes as whole numbers, such as scales of e8m0."""
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
