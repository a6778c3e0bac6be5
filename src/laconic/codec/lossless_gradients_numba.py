"""Lossless gradients on a CPU, compiled by numba: a block is a few loops over its values."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# numba types the functions that it compiles

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.codec.loops import array_of, compiled
from laconic.codec.lossless_gradients import BLOCK, LOWEST_TOP, OUTSIDE, GradientForm

_BLOCK, _OUTSIDE, _LOWEST_TOP = BLOCK, np.uint8(OUTSIDE), LOWEST_TOP
_CODE_BYTES = BLOCK * 3 // 8

_compiled = compiled(repr((BLOCK, OUTSIDE, LOWEST_TOP)).encode())


def encode(form: GradientForm, values: Tensor) -> Tensor:
    """See `lossless_gradients.encode`: a message that may be longer than the values.

    Reference: tests/reference/lossless_gradients.py.
    """
    num_blocks = -(-len(values) // BLOCK)
    message = np.empty(num_blocks * (1 + form.row_bytes + BLOCK), np.uint8)
    outside = np.empty(num_blocks * BLOCK, np.uint8)
    length = _encode(_halves(values), 1 + form.tail_bytes // 2, form.extra_bits, form.row_bytes, message, outside)
    return torch.from_numpy(message[:length])


def decode(form: GradientForm, message: Tensor, out: Tensor) -> bool:
    """See `lossless_gradients.decode`. Returns whether the sizes agree."""
    halves = _halves(out)
    return bool(_decode(array_of(message), halves, 1 + form.tail_bytes // 2, form.extra_bits, form.row_bytes))


def _halves(values: Tensor) -> np.ndarray:
    found: np.ndarray = array_of(values.view(torch.int16))
    return found


@_compiled
def _pack(codes, row):
    """Put codes of three bits side by side, the first in the lowest bits."""
    for index in range(_BLOCK // 8):
        word = np.uint32(0)
        for place in range(8):
            word |= np.uint32(codes[8 * index + place]) << np.uint32(3 * place)
        for place in range(3):
            row[3 * index + place] = np.uint8(word >> np.uint32(8 * place))


@_compiled
def _unpack(row, codes):
    for index in range(_BLOCK // 8):
        word = np.uint32(0)
        for place in range(3):
            word |= np.uint32(row[3 * index + place]) << np.uint32(8 * place)
        for place in range(8):
            codes[8 * index + place] = np.uint8((word >> np.uint32(3 * place)) & np.uint32(7))


@_compiled
def _encode(halves, step, extra_bits, row_bytes, message, outside):
    """Write the message; its bytes. A value has `step` halves, of which the last has sign and exponent."""
    numel = len(halves) // step
    num_blocks = (numel + _BLOCK - 1) // _BLOCK
    upper, lower = np.empty(_BLOCK, np.int16), np.empty(_BLOCK, np.int16)
    exponents, rest, codes = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    at, num_outside = num_blocks, 0
    for block in range(num_blocks):
        begin, own = block * _BLOCK, min(_BLOCK, numel - block * _BLOCK)
        for i in range(own):
            upper[i] = halves[(begin + i) * step + step - 1]
        lower[:] = 0
        if step > 1:
            for i in range(own):
                lower[i] = halves[(begin + i) * step]
        upper[own:], lower[own:] = upper[own - 1], lower[own - 1]
        some = np.int16(0)
        for i in range(_BLOCK):
            some |= upper[i] | lower[i]
        if some == 0:
            message[block] = 0
            continue
        row = message[at : at + row_bytes]
        at += row_bytes
        for i in range(_BLOCK):
            turned = (np.uint16(upper[i]) << np.uint16(1)) | (np.uint16(upper[i]) >> np.uint16(15))
            row[i] = np.uint8(turned)
            rest[i] = np.uint8(turned >> np.uint16(8))
        for i in range(_BLOCK):
            exponents[i] = rest[i] >> np.uint8(extra_bits)
        end = _BLOCK
        if extra_bits:
            for i in range(_BLOCK):
                rest[i] &= np.uint8(7)
            _pack(rest, row[end:])
            end += _CODE_BYTES
        if step > 1:
            for i in range(_BLOCK):
                row[end + 2 * i] = np.uint8(lower[i])
                row[end + 2 * i + 1] = np.uint8(np.uint16(lower[i]) >> np.uint16(8))
            end += 2 * _BLOCK
        total, highest = np.int32(0), np.uint8(0)
        for i in range(_BLOCK):
            total += np.int32(exponents[i])
            highest = max(highest, exponents[i])
        top = np.uint8(max(min((total + _BLOCK // 2) // _BLOCK + 3, np.int32(highest)), _LOWEST_TOP))
        message[block] = top
        for i in range(_BLOCK):
            codes[i] = min(np.uint8(top - exponents[i]), _OUTSIDE)
        _pack(codes, row[end:])
        for i in range(_BLOCK):
            outside[num_outside] = exponents[i]
            num_outside += codes[i] == _OUTSIDE
    message[at : at + num_outside] = outside[:num_outside]
    return at + num_outside


@_compiled
def _decode(message, halves, step, extra_bits, row_bytes):
    """Read the values; whether the sizes agree."""
    numel = len(halves) // step
    num_blocks = (numel + _BLOCK - 1) // _BLOCK
    exponents, rest, codes = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    num_live = 0
    for block in range(num_blocks):
        num_live += message[block] > 0
    at, outside_at = num_blocks, num_blocks + num_live * row_bytes
    if outside_at > len(message):
        return False
    for block in range(num_blocks):
        begin, own, top = block * _BLOCK, min(_BLOCK, numel - block * _BLOCK), message[block]
        if top == 0:
            halves[begin * step : (begin + own) * step] = 0
            continue
        row = message[at : at + row_bytes]
        at += row_bytes
        end = row_bytes - _CODE_BYTES
        _unpack(row[end:], codes)
        num_outside = 0
        for i in range(_BLOCK):
            exponents[i] = top - codes[i]
            num_outside += codes[i] == _OUTSIDE
        if outside_at + num_outside > len(message):
            return False
        if num_outside:
            for i in range(_BLOCK):
                if codes[i] == _OUTSIDE:
                    exponents[i] = message[outside_at]
                    outside_at += 1
        if extra_bits:
            _unpack(row[_BLOCK:], rest)
            for i in range(_BLOCK):
                exponents[i] = exponents[i] << np.uint8(extra_bits) | rest[i]
        for i in range(own):
            turned = np.uint16(exponents[i]) << np.uint16(8) | np.uint16(row[i])
            upper = turned >> np.uint16(1) | turned << np.uint16(15)
            halves[(begin + i) * step + step - 1] = np.int16(upper)
        if step > 1:
            for i in range(own):
                lower = np.uint16(row[_BLOCK + 2 * i]) | np.uint16(row[_BLOCK + 2 * i + 1]) << np.uint16(8)
                halves[(begin + i) * step] = np.int16(lower)
    return outside_at == len(message)
