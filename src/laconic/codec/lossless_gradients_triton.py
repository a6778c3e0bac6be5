"""Lossless gradients in few kernels of triton: a program has some blocks of values, and writes or reads their rows.

Messages have the bytes of those of codec/lossless_gradients_numba.py, and so have values.

[Note: Kernels of lossless gradients]
Where a row begins depends on the blocks of zeros before it, and where exponents outside of windows begin depends on all
those before them. So programs count first, torch adds the counts up, and other programs write or read:

    encode      `_measure` counts the blocks that are not of zeros, and the exponents outside, of each program. The sums
                say how long the message is. `_write` finds tops and codes again, which takes less than to keep them,
                and writes the message; or the values themselves, if they are no longer.
    decode      `_count_live` counts tops, and `_count_outside` codes, which it finds by the sums of the first.
                `_read` reads the values.

The host reads nothing. Rows begin at any byte, so they are written and read byte by byte, by neighbours at once.
Whatever a damaged message says, a row or an exponent that does not lie in the message as a whole is not read.

Addresses and lengths of messages vary from step to step. So kernels take those as they are, as in [Note: Lossless
kernels].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codec.lossless_gradients import BLOCK, LOWEST_TOP, OUTSIDE, GradientForm

NUM_WARPS = 4
PROGRAM_BLOCKS = 8
"""The blocks of a program."""
COUNTED_PROGRAMS = 256
"""The programs for which one of `_count_live` counts."""
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_BLOCKS: tl.constexpr = tl.constexpr(PROGRAM_BLOCKS)
_PROGRAMS: tl.constexpr = tl.constexpr(COUNTED_PROGRAMS)
_OUTSIDE: tl.constexpr = tl.constexpr(OUTSIDE)
_LOWEST_TOP: tl.constexpr = tl.constexpr(LOWEST_TOP)
_WORDS: tl.constexpr = tl.constexpr(BLOCK // 8)
"""The words of three bytes that eight codes take each."""
_CODE_BYTES: tl.constexpr = tl.constexpr(BLOCK * 3 // 8)


def encode(form: GradientForm, values: Tensor) -> tuple[Tensor, Tensor]:
    """The message, or the values if it is no shorter, and its length. See `lossless_gradients.encode`.

    Shapes: values (n,), n > 0, contiguous, on CUDA -> (bytes of values,), uint8, of which the message is the first
        part, and (1,), int64, its bytes. The host reads nothing.
    """
    device, patterns = values.device, _patterns(values)
    of_form, row = constants_of_gradients(form), {"ROW_BYTES": form.row_bytes}
    num_programs = triton.cdiv(len(values), PROGRAM_BLOCKS * BLOCK)
    counts, length = (torch.empty(size, dtype=torch.int64, device=device) for size in (num_programs, 1))
    _measure[(num_programs,)](patterns, counts, len(values), **of_form, num_warps=NUM_WARPS)
    buffer = torch.empty(values.nbytes, dtype=torch.uint8, device=device)
    _write[(num_programs,)](
        patterns, counts.cumsum(0), buffer, buffer.view(patterns.dtype), length, len(values),
        triton.cdiv(len(values), BLOCK), values.nbytes, **of_form, **row, num_warps=NUM_WARPS,
    )  # fmt: skip
    return buffer, length


def decode(form: GradientForm, message: Tensor, out: Tensor) -> None:
    """Decode a message that is not the values themselves into `out`; if it is damaged, other values come out.

    Shapes: message (bytes,), uint8, no shorter than its tops; out (n,), contiguous, on CUDA. The host reads nothing.
    """
    num_blocks, nbytes, row = triton.cdiv(len(out), BLOCK), len(message), {"ROW_BYTES": form.row_bytes}
    num_programs = triton.cdiv(num_blocks, PROGRAM_BLOCKS)
    live, outside = (torch.empty(num_programs, dtype=torch.int64, device=out.device) for _ in range(2))
    _count_live[(triton.cdiv(num_programs, COUNTED_PROGRAMS),)](message, live, num_blocks, num_warps=NUM_WARPS)
    live_ends = live.cumsum(0)
    _count_outside[(num_programs,)](message, live_ends, outside, num_blocks, nbytes, **row, num_warps=NUM_WARPS)
    _read[(num_programs,)](
        message, live_ends, outside.cumsum(0), _patterns(out), len(out), num_blocks, nbytes,
        **constants_of_gradients(form), **row, num_warps=NUM_WARPS,
    )  # fmt: skip


def constants_of_gradients(form: GradientForm) -> dict[str, int]:
    """The constants of the kernels over values for a form, besides the bytes of a row."""
    return {"EXTRA_BITS": form.extra_bits, "TAIL_BYTES": form.tail_bytes}


def _patterns(values: Tensor) -> Tensor:
    """The values as whole numbers of as many bits."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


@triton.jit
def _before(ends):  # type: ignore[no-untyped-def]  # triton types its arguments
    """The sum of the counts of the programs before this one."""
    return tl.load(ends + tl.program_id(0) - 1, mask=tl.program_id(0) > 0, other=0)


@triton.jit
def _own(numel):  # type: ignore[no-untyped-def]
    """This program's first value, int64; how many it has; and the places of its blocks' values after the first."""
    first = tl.program_id(0).to(tl.int64) * (_BLOCKS * _BLOCK)
    place = tl.arange(0, _BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return first, tl.minimum(numel - first, _BLOCKS * _BLOCK).to(tl.int32), place


# -- encode ------------------------------------------------------------------------------------------------------------


@triton.jit
def _patterns_of_blocks(values, numel):  # type: ignore[no-untyped-def]
    """Those of this program's blocks, (_BLOCKS, _BLOCK), int32. What is missing after the last value is as that one."""
    first, num, place = _own(numel)
    pattern = tl.load(values + first + place, mask=place < num, other=0)
    return tl.where(place < num, pattern, tl.load(values + first + num - 1)).to(tl.int32)


@triton.jit
def _coded(pattern, numel, EXTRA_BITS: tl.constexpr, TAIL_BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The upper halves with their signs as the lowest bit, the tops of blocks, the codes, and which are outside."""
    upper = pattern >> (8 * TAIL_BYTES)
    turned = ((upper << 1) | ((upper >> 15) & 1)) & 0xFFFF
    exponent = turned >> (8 + EXTRA_BITS)
    _, num, place = _own(numel)
    is_live = tl.max(((pattern != 0) & (place < num)).to(tl.int32), axis=1) > 0
    middle = (tl.sum(exponent, axis=1) + _BLOCK // 2) // _BLOCK
    top = tl.maximum(tl.minimum(middle + _OUTSIDE // 2, tl.max(exponent, axis=1)), _LOWEST_TOP)
    code = tl.minimum((top[:, None] - exponent) & 0xFF, _OUTSIDE)  # exponents above it wrap around
    return turned, tl.where(is_live, top, 0), code, ((code == _OUTSIDE) & is_live[:, None]).to(tl.int32)


@triton.jit
def _measure(  # type: ignore[no-untyped-def]
    values, counts, numel, EXTRA_BITS: tl.constexpr, TAIL_BYTES: tl.constexpr
):
    _, top, _, is_outside = _coded(_patterns_of_blocks(values, numel), numel, EXTRA_BITS, TAIL_BYTES)
    num_live = tl.sum((top > 0).to(tl.int32), axis=0).to(tl.int64)
    num_outside = tl.sum(tl.sum(is_outside, axis=1), axis=0).to(tl.int64)
    tl.store(counts + tl.program_id(0), (num_live << 32) | num_outside)


@triton.jit
def _both(counts):  # type: ignore[no-untyped-def]
    """A number of blocks that are not of zeros, and one of exponents outside, of what `_measure` counts."""
    return counts >> 32, counts & 0xFFFFFFFF


@triton.jit
def _store_codes(to, begin, code, is_live):  # type: ignore[no-untyped-def]
    """Write codes of three bits, (_BLOCKS, _BLOCK), from a place of each block on."""
    bits = tl.reshape(code, (_BLOCKS, _WORDS, 8)) << (3 * tl.arange(0, 8))[None, None, :]
    words, at = tl.sum(bits, axis=2), begin[:, None] + 3 * tl.arange(0, _WORDS)[None, :]  # no two share a bit
    for place in tl.static_range(3):
        tl.store(to + (at + place), (words >> (8 * place)).to(tl.uint8), mask=is_live[:, None])


@triton.jit(do_not_specialize=["num_blocks", "whole"])
def _write(  # type: ignore[no-untyped-def]
    values,
    ends,
    buffer,
    buffer_values,
    length,
    numel,
    num_blocks,
    whole,
    EXTRA_BITS: tl.constexpr,
    TAIL_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    num_live, num_outside = _both(tl.load(ends + tl.num_programs(0) - 1))
    outside_begin = num_blocks + num_live * ROW_BYTES
    nbytes = outside_begin + num_outside
    if tl.program_id(0) == 0:
        tl.store(length, tl.minimum(nbytes, whole))
    pattern = _patterns_of_blocks(values, numel)
    if nbytes >= whole:
        first, num, place = _own(numel)
        tl.store(buffer_values + first + place, pattern.to(buffer_values.dtype.element_ty), mask=place < num)
    else:
        turned, top, code, is_outside = _coded(pattern, numel, EXTRA_BITS, TAIL_BYTES)
        block = tl.program_id(0) * _BLOCKS + tl.arange(0, _BLOCKS)
        tl.store(buffer + block, top.to(tl.uint8), mask=block < num_blocks)
        live_before, outside_before = _both(_before(ends))
        is_live, lane = top > 0, tl.arange(0, _BLOCK)[None, :]
        to = buffer + num_blocks + live_before * ROW_BYTES
        row = (tl.cumsum(is_live.to(tl.int32), axis=0) - 1) * ROW_BYTES
        tl.store(to + (row[:, None] + lane), turned.to(tl.uint8), mask=is_live[:, None])
        if EXTRA_BITS > 0:
            _store_codes(to, row + _BLOCK, (turned >> 8) & 7, is_live)
        for place in tl.static_range(TAIL_BYTES):
            octet = (pattern >> (8 * place)).to(tl.uint8)
            tl.store(to + (row[:, None] + TAIL_BYTES * lane + _BLOCK + place), octet, mask=is_live[:, None])
        _store_codes(to, row + ROW_BYTES - _CODE_BYTES, code, is_live)
        to = buffer + outside_begin + outside_before
        tl.store(to + _ranks(is_outside), (turned >> (8 + EXTRA_BITS)).to(tl.uint8), mask=is_outside != 0)


@triton.jit
def _ranks(is_outside):  # type: ignore[no-untyped-def]
    """How many of this program's exponents outside come before each one."""
    num = tl.sum(is_outside, axis=1)
    return (tl.cumsum(num, axis=0) - num)[:, None] + tl.cumsum(is_outside, axis=1) - is_outside


# -- decode ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["message"])
def _count_live(message, counts, num_blocks):  # type: ignore[no-untyped-def]
    program = tl.program_id(0) * _PROGRAMS + tl.arange(0, _PROGRAMS)
    block = program[:, None] * _BLOCKS + tl.arange(0, _BLOCKS)[None, :]
    top = tl.load(message + block, mask=block < num_blocks, other=0)
    num_live = tl.sum((top > 0).to(tl.int32), axis=1)
    tl.store(counts + program, num_live.to(tl.int64), mask=program * _BLOCKS < num_blocks)


@triton.jit
def _rows(message, live_ends, num_blocks, nbytes, ROW_BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tops of this program's blocks, the address of its rows, their places, and which are there as a whole."""
    block = tl.program_id(0) * _BLOCKS + tl.arange(0, _BLOCKS)
    top = tl.load(message + block, mask=block < num_blocks, other=0).to(tl.int32)
    begin = num_blocks + _before(live_ends) * ROW_BYTES
    end = tl.cumsum((top > 0).to(tl.int32), axis=0) * ROW_BYTES
    return top, message + begin, end - ROW_BYTES, (top > 0) & (begin + end <= nbytes)


@triton.jit
def _words_at(rows, begin, is_row):  # type: ignore[no-untyped-def]
    """Words of three bytes, (_BLOCKS, _WORDS), from a place of each block on; zeros of a row that is not there."""
    words, at = tl.zeros((_BLOCKS, _WORDS), tl.int32), begin[:, None] + 3 * tl.arange(0, _WORDS)[None, :]
    for place in tl.static_range(3):
        octet = tl.load(rows + (at + place), mask=is_row[:, None], other=0)
        words |= octet.to(tl.int32) << (8 * place)
    return words


@triton.jit
def _codes_at(rows, begin, is_row):  # type: ignore[no-untyped-def]
    """What `_store_codes` has written."""
    words = _words_at(rows, begin, is_row)
    return tl.reshape((words[:, :, None] >> (3 * tl.arange(0, 8))[None, None, :]) & 7, (_BLOCKS, _BLOCK))


@triton.jit(do_not_specialize=["num_blocks", "nbytes"], do_not_specialize_on_alignment=["message"])
def _count_outside(  # type: ignore[no-untyped-def]
    message, live_ends, counts, num_blocks, nbytes, ROW_BYTES: tl.constexpr
):
    _, rows, row, is_row = _rows(message, live_ends, num_blocks, nbytes, ROW_BYTES)
    words = _words_at(rows, row + (ROW_BYTES - _CODE_BYTES), is_row)
    num = tl.zeros_like(words)
    for place in tl.static_range(8):
        num += (((words >> (3 * place)) & 7) == _OUTSIDE).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(num, axis=1), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["num_blocks", "nbytes"], do_not_specialize_on_alignment=["message"])
def _read(  # type: ignore[no-untyped-def]
    message,
    live_ends,
    outside_ends,
    out,
    numel,
    num_blocks,
    nbytes,
    EXTRA_BITS: tl.constexpr,
    TAIL_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    lane = tl.arange(0, _BLOCK)[None, :]
    top, rows, row, is_row = _rows(message, live_ends, num_blocks, nbytes, ROW_BYTES)
    code = _codes_at(rows, row + (ROW_BYTES - _CODE_BYTES), is_row)
    is_outside = (code == _OUTSIDE).to(tl.int32)
    begin = num_blocks + tl.load(live_ends + tl.num_programs(0) - 1) * ROW_BYTES + _before(outside_ends)
    most, rank = tl.minimum(tl.maximum(nbytes - begin, 0), _BLOCKS * _BLOCK).to(tl.int32), _ranks(is_outside)
    outside = tl.load(message + begin + rank, mask=(is_outside != 0) & (rank < most), other=0).to(tl.int32)
    turned = tl.where(is_outside != 0, outside, (top[:, None] - code) & 0xFF) << EXTRA_BITS
    if EXTRA_BITS > 0:
        turned |= _codes_at(rows, row + _BLOCK, is_row)
    turned = (turned << 8) | tl.load(rows + (row[:, None] + lane), mask=is_row[:, None], other=0).to(tl.int32)
    pattern = (((turned >> 1) & 0x7FFF) | ((turned & 1) << 15)) << (8 * TAIL_BYTES)
    for place in tl.static_range(TAIL_BYTES):
        octet = tl.load(rows + (row[:, None] + TAIL_BYTES * lane + _BLOCK + place), mask=is_row[:, None], other=0)
        pattern |= octet.to(tl.int32) << (8 * place)
    first, num, place = _own(numel)
    pattern = tl.where(is_row[:, None], pattern, 0)
    tl.store(out + first + place, pattern.to(out.dtype.element_ty), mask=place < num)
