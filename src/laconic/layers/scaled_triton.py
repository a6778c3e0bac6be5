"""The scaled formats in one triton kernel each way: a matrix is read once, and its codes and scales are written once.

A program takes some blocks of the matrix, whose elements lie side by side in a row of its tensors. Both kernels have
the bits of the plain chains in layers/scaled.py on every GPU: e4m3 and e2m1 numbers are made and read as integers, as
GPUs before the H100 need anyhow, and quotients are rounded correctly. The one exception is the sign of a NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codec.blocked_triton import rounded_to

NUMEL = 2048
"""The values of a program, unless a block has more: sixteen for each thread of four warps."""
_LARGEST_E4M3: tl.constexpr = tl.constexpr(448.0)
_LARGEST_E2M1: tl.constexpr = tl.constexpr(6.0)
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-6)
_SMALLEST_MAGNITUDE: tl.constexpr = tl.constexpr(1e-12)


def encode(form: Any, matrix: Tensor, matrix_scale: Tensor | None, codes: Tensor, scales: Tensor) -> None:
    """Encode a matrix, (m, n), contiguous, of any floating dtype, by a `ScaledFormat` that `has_kernels`.

    Shapes: codes and scales of its `codes_shape` and `scales_shape`, contiguous; matrix_scale (), fp32.
    """
    _launch(_encode, form, matrix.shape, matrix, matrix_scale, codes, scales)


def decode(form: Any, codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, out: Tensor) -> None:
    """Decode what `encode` wrote into `out`, (m, n), contiguous, of any floating dtype."""
    _launch(_decode, form, out.shape, out, matrix_scale, codes, scales)


def constants_of_format(form: Any) -> dict[str, Any]:
    """The constants of the kernels for a `ScaledFormat`."""
    numel = form.height * form.width
    return {"SCALE": form.scale, "HEIGHT": form.height, "WIDTH": form.width, "BLOCKS": max(1, NUMEL // numel)}


def num_warps(form: Any) -> int:
    """The warps of a program: no thread has more than 32 values."""
    return max(4, form.height * form.width // 1024)


def _launch(
    kernel: Any, form: Any, shape: Any, matrix: Tensor, matrix_scale: Tensor | None, codes: Tensor, scales: Tensor
) -> None:
    (num_rows, num_columns), (down, across) = shape, form.scales_shape(shape)
    own = constants_of_format(form)
    known = scales if form.scale == "fp32" else scales.view(torch.uint8)  # triton does not know e8m0
    if matrix.numel():
        kernel[(triton.cdiv(down * across, own["BLOCKS"]),)](
            matrix, codes.view(torch.uint8), known, known if matrix_scale is None else matrix_scale, num_rows,
            num_columns, across, **own, enable_fp_fusion=False, num_warps=num_warps(form),
        )  # fmt: skip


@triton.jit
def _encode(  # type: ignore[no-untyped-def]  # triton types its arguments
    values,
    codes,
    scales,
    matrix_scale,
    num_rows,
    num_columns,
    across,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block, top, left, at, is_own = _own_blocks(num_rows, num_columns, across, HEIGHT, WIDTH, BLOCKS)
    x = tl.load(values + at, mask=is_own, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    # by the order of whole numbers NaN exceeds infinity, which exceeds all numbers
    largest = tl.max(bits & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        of_matrix = tl.load(matrix_scale) + tl.zeros_like(largest)
        scale = tl.div_rn(tl.div_rn(largest, tl.full(largest.shape, _LARGEST_E2M1, tl.float32)), of_matrix)
        scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
        scale = _to_e4m3(tl.where(scale > _LARGEST_E4M3, _LARGEST_E4M3, scale))
        inverse = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), of_matrix)
        code = _to_e2m1(x, tl.div_rn(inverse, _from_e4m3(scale))[:, None])
        code = tl.sum(tl.reshape(code, (BLOCKS, WIDTH // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :], axis=2)
        tl.store(scales + block, scale.to(tl.uint8), mask=top < num_rows)
        place = (left // 2)[:, None] + tl.arange(0, WIDTH // 2)[None, :]
        is_own = (top < num_rows)[:, None] & (place < num_columns // 2)
        at = top[:, None].to(tl.int64) * (num_columns // 2) + place
    else:
        largest = tl.where(largest < _SMALLEST_MAGNITUDE, _SMALLEST_MAGNITUDE, largest)  # NaN stays
        scale = tl.div_rn(largest, tl.full(largest.shape, _LARGEST_E4M3, tl.float32))
        if SCALE == "fp32":
            code = _to_e4m3(tl.div_rn(x, scale[:, None] + tl.zeros_like(x)))
            tl.store(scales + block, scale, mask=top < num_rows)
        else:
            own = scale.to(tl.int32, bitcast=True)
            biased = (own >> 23) + ((own & 0x7FFFFF) != 0).to(tl.int32)  # the next power of two
            biased = tl.minimum(tl.maximum(biased, 1), 253)
            inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
            code = _to_e4m3(x * inverse[:, None])
            biased = tl.where(own < 0x7F800000, biased, 255)
            tl.store(scales + block, biased.to(tl.uint8), mask=top < num_rows)
    tl.store(codes + at, code.to(tl.uint8), mask=is_own)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    out,
    codes,
    scales,
    matrix_scale,
    num_rows,
    num_columns,
    across,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block, top, left, at, is_own = _own_blocks(num_rows, num_columns, across, HEIGHT, WIDTH, BLOCKS)
    scale = tl.load(scales + block, mask=top < num_rows, other=0)
    if SCALE == "e4m3":
        scale = _from_e4m3(scale.to(tl.int32)) * tl.load(matrix_scale)
        place = (left // 2)[:, None] + tl.arange(0, WIDTH // 2)[None, :]
        is_pair = (top < num_rows)[:, None] & (place < num_columns // 2)
        pair = tl.load(codes + top[:, None].to(tl.int64) * (num_columns // 2) + place, mask=is_pair, other=0)
        apart = (pair.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15
        number = _from_e2m1(tl.reshape(apart, (BLOCKS, WIDTH)))
    else:
        if SCALE == "e8m0":
            biased = scale.to(tl.int32)
            bits = tl.where(biased == 0, 0x400000, biased << 23)
            scale = tl.where(biased == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        number = _from_e4m3(tl.load(codes + at, mask=is_own, other=0).to(tl.int32))
    tl.store(out + at, rounded_to(number * scale[:, None], out.dtype.element_ty), mask=is_own)


@triton.jit
def _own_blocks(num_rows, num_columns, across, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    # the program's blocks, their first rows and columns, and the places of their elements, those in the matrix marked
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    top = block // across * HEIGHT
    left = block % across * WIDTH
    inner = tl.arange(0, HEIGHT * WIDTH)
    row = top[:, None] + (inner // WIDTH)[None, :]
    column = left[:, None] + (inner % WIDTH)[None, :]
    at = row.to(tl.int64) * num_columns + column
    is_own = (row < num_rows) & (column < num_columns)
    return block, top, left, at, is_own


@triton.jit
def _to_e4m3(value):  # type: ignore[no-untyped-def]
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # a sum with 2^14 has its last place where the small numbers of e4m3 have theirs, and rounds there
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    return tl.where(size < (121 << 23), small, tl.minimum(normal, 127)) | ((bits >> 24) & 128)


@triton.jit
def _from_e4m3(code):  # type: ignore[no-untyped-def]
    size = code & 127
    small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # in steps of 2^-9
    bits = tl.where(size < 8, small, (size << 20) + (120 << 23))
    return (tl.where(size == 127, 0x7FC00000, bits) | ((code & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _to_e2m1(x, inverse):  # type: ignore[no-untyped-def]
    size = tl.abs(x) * inverse
    # a tie takes the even code; NaN, which no border exceeds, takes the last
    below = (size <= 0.25).to(tl.int32) + (size < 0.75).to(tl.int32) + (size <= 1.25).to(tl.int32)
    below += (size < 1.75).to(tl.int32) + (size <= 2.5).to(tl.int32) + (size < 3.5).to(tl.int32)
    code = 7 - below - (size <= 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _from_e2m1(code):  # type: ignore[no-untyped-def]
    size = code & 7
    small = (size.to(tl.float32) * 0.5).to(tl.int32, bitcast=True)
    bits = tl.where(size < 2, small, (size << 22) + (126 << 23))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
