"""The oracle of lossless gradients: values as Python's whole numbers, one at a time, and messages as lists of bytes.

The format is that of [Note: Lossless gradients] in codec/lossless_gradients.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK, WINDOW = 256, 7


class Form(NamedTuple):
    """The bits of a value, and of its mantissa."""

    bits: int
    mantissa_bits: int


FORMS = {"bfloat16": Form(16, 7), "float16": Form(16, 10), "float32": Form(32, 23)}


def encode(form: Form, patterns: Sequence[int]) -> list[int]:
    """The bytes of a message, or of the values themselves if these are not more."""
    whole = [octet for pattern in patterns for octet in octets(pattern, form.bits // 8)]
    filled = [*patterns, *patterns[-1:] * (-len(patterns) % BLOCK)]
    tops, rows, outside = [], [], []
    for begin in range(0, len(filled), BLOCK):
        block = filled[begin : begin + BLOCK]
        if not any(block):
            tops.append(0)
            continue
        exponents = [exponent(form, pattern) for pattern in block]
        top = top_of(exponents)
        tops.append(top)
        rows += row(form, block, [top - each for each in exponents])
        outside += [each for each in exponents if not 0 <= top - each < WINDOW]
    message = [*tops, *rows, *outside]
    return message if len(message) < len(whole) else whole


def top_of(exponents: Sequence[int]) -> int:
    """The highest exponent of the window: three above the mean, which is rounded, but not above all; six at least."""
    mean = (2 * sum(exponents) + BLOCK) // (2 * BLOCK)
    return max(min(mean + 3, max(exponents)), WINDOW - 1)


def exponent(form: Form, pattern: int) -> int:
    return (pattern >> form.mantissa_bits) % 2 ** (form.bits - 1 - form.mantissa_bits)


def row(form: Form, block: Sequence[int], below: Sequence[int]) -> list[int]:
    """The bytes of a block of values whose exponents lie so far below the top."""
    lower_bits = form.bits - 16
    rests = [rest_of(form, pattern) >> lower_bits for pattern in block]
    found = [rest % 256 for rest in rests]
    if form.mantissa_bits - lower_bits > 7:
        found += in_threes([rest >> 8 for rest in rests])
    if lower_bits:
        found += [octet for pattern in block for octet in octets(pattern % 2**lower_bits, lower_bits // 8)]
    return found + in_threes([each if 0 <= each < WINDOW else WINDOW for each in below])


def rest_of(form: Form, pattern: int) -> int:
    """The bits of a value besides its exponent. The sign is the lowest of the upper half."""
    sign, mantissa = pattern >> (form.bits - 1), pattern % 2**form.mantissa_bits
    lower_bits = form.bits - 16
    upper, lower = mantissa >> lower_bits, mantissa % 2**lower_bits
    return (2 * upper + sign) << lower_bits | lower


def in_threes(codes: Sequence[int]) -> list[int]:
    """Codes of three bits side by side, the first in the lowest bits."""
    bits = [code >> place & 1 for code in codes for place in range(3)]
    return [sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]


def octets(number: int, count: int) -> list[int]:
    return [number >> 8 * place & 255 for place in range(count)]
