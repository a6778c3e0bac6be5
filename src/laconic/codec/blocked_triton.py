"""The block codecs in one triton kernel each way: a piece is read once and its message, or its values, written once.

Both kernels have the bits of the plain chains in codec/blocked.py. They round each operation once: no multiply-add is
fused, and quotients and roots are rounded correctly. bf16 numbers are made and read as integers, because triton's
interpreter cuts them off where devices round. The one exception are the steps of two bits, which hold a sum of 128
squares: its order is the device's. A rotation, before values are encoded or after they are decoded, is part of the
kernel: [Note: The order of the rotation's sums] in codec/rotation.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codec.blocked import KERNEL_NUMEL as NUMEL
from laconic.codec.rotation import ROOT_INVERSE, rotated_numel

_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.bfloat16).tiny)
_ROUNDS: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
"""A number whose sum with a small one has no room behind the point, so the sum rounds to the nearest even."""
_NAN: tl.constexpr = tl.constexpr(0x7FC0)
_ROOT_INVERSE: tl.constexpr = tl.constexpr(ROOT_INVERSE)


def encode(
    codec: Any, values: Tensor, base: Tensor | None, codes: Tensor, steps: Tensor, *, rotates: bool = False
) -> None:
    """Encode `values`, or their difference to `base`, (n,), of any floating dtypes.

    `rotates` is that of `Codec.encode_into`.

    Shapes: codes (code_bytes(m),) and steps (2 * num_blocks(m),), both uint8, at any addresses; m is n, or with
        `rotates` rotated_numel(n).
    """
    form = _form(codec, values.device)
    numel = rotated_numel(values.numel()) if rotates else values.numel()
    _encode[(triton.cdiv(codec.num_blocks(numel), NUMEL // codec.block),)](
        values, values if base is None else base, codes, steps, form.borders, values.numel(), numel, codes.numel(),
        SUBTRACTS=base is not None, ROTATES=rotates, **constants(codec, form), **_OPTIONS,
    )  # fmt: skip


def decode(codec: Any, codes: Tensor, steps: Tensor, out: Tensor, *, adds: bool = False, rotates: bool = False) -> None:
    """Decode what `encode` wrote into `out`, (n,), of any floating dtype; with `adds`, add it to what is there."""
    form = _form(codec, out.device)
    numel = rotated_numel(out.numel()) if rotates else out.numel()
    _decode[(triton.cdiv(codec.num_blocks(numel), NUMEL // codec.block),)](
        out, codes, steps, form.numbers, out.numel(), numel, codes.numel(),
        ADDS=adds, ROTATES=rotates, **constants(codec, form), **_OPTIONS,
    )  # fmt: skip


_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


@lru_cache
def _form(codec: Any, device: torch.device) -> Any:
    return codec.form(device)


def constants(codec: Any, form: Any) -> dict[str, Any]:
    """The constants of the kernels for a `BlockCodec` and its form."""
    rows = NUMEL // codec.block
    return {"KIND": form.kind, "BITS": form.bits, "LARGEST": form.largest, "BLOCK": codec.block, "ROWS": rows}


@triton.jit
def _encode(  # type: ignore[no-untyped-def]  # triton types its arguments
    values,
    base,
    codes,
    steps,
    borders,
    numel,
    coded_numel,
    code_bytes,
    SUBTRACTS: tl.constexpr,
    ROTATES: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
    if SUBTRACTS:
        x -= tl.load(base + at, mask=at < numel, other=0.0).to(tl.float32)
    if ROTATES:
        x = _rotated(x, ROWS, BLOCK)
    sizes = tl.abs(x)
    largest = tl.max(sizes, axis=1)
    zero = tl.sum(x * 0.0, axis=1)
    is_bad = zero != zero  # a value is NaN or infinite
    step = largest
    if KIND == "even" or KIND == "float":
        step = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    if KIND == "two":
        ratios = tl.div_rn(
            x, tl.maximum(largest, tl.full(largest.shape, 1e-38, tl.float32))[:, None] + tl.zeros_like(x)
        )
        count = tl.minimum(coded_numel - row * BLOCK, BLOCK).to(tl.float32)
        step = largest * tl.sqrt_rn(tl.div_rn(tl.sum(ratios * ratios, axis=1), count)) * LARGEST
    if KIND == "quantile":  # scales are rounded up: no value exceeds its scale
        half = (step.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    else:
        bits = tl.maximum(step, _TINY).to(tl.int32, bitcast=True)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    wide = (half << 16).to(tl.float32, bitcast=True)
    x = tl.where(is_bad[:, None], 0.0, x)
    if KIND == "quantile":
        scale = wide[:, None] + tl.zeros_like(x)
        ratios = tl.where(scale > 0, tl.div_rn(x, scale), 0.0)
        code = tl.zeros(x.shape, tl.int32)
        for index in tl.static_range(15):
            code += (ratios > tl.load(borders + index)).to(tl.int32)
    else:
        inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), wide)[:, None]
        if KIND == "two":
            code = tl.minimum(tl.maximum(x * (inverse * 0.5) + 2.0, 0.0), 3.0).to(tl.int32)
            half = tl.where(largest == 0, 0, half)
        elif KIND == "float":
            halves = tl.minimum(tl.abs(x) * (inverse * 2.0), 2.0 * LARGEST + 1).to(tl.int32).to(tl.float32)
            code = tl.where(x < 0, 8, 0)
            for index in tl.static_range(7):
                code += (halves >= tl.load(borders + index)).to(tl.int32)
        elif BITS == 8:
            code = ((x * inverse + _ROUNDS) - _ROUNDS).to(tl.int32) & 255
        else:
            code = (x * inverse + (LARGEST + 0.5)).to(tl.int32)
    half = tl.where(is_bad, _NAN, half)
    tl.store(steps + 2 * row, (half & 255).to(tl.uint8), mask=row * BLOCK < coded_numel)
    tl.store(steps + 2 * row + 1, (half >> 8).to(tl.uint8), mask=row * BLOCK < coded_numel)
    PER: tl.constexpr = 8 // BITS
    byte = code
    if PER > 1:
        apart = tl.reshape(code, (ROWS, BLOCK // PER, PER))
        byte = tl.sum(apart << (BITS * tl.arange(0, PER))[None, None, :], axis=2)
    place = row[:, None] * (BLOCK // PER) + tl.arange(0, BLOCK // PER)[None, :]
    tl.store(codes + place, byte.to(tl.uint8), mask=place < code_bytes)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    out,
    codes,
    steps,
    numbers,
    numel,
    coded_numel,
    code_bytes,
    ADDS: tl.constexpr,
    ROTATES: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    PER: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row * BLOCK < coded_numel
    low = tl.load(steps + 2 * row, mask=is_row, other=0).to(tl.int32)
    high = tl.load(steps + 2 * row + 1, mask=is_row, other=0).to(tl.int32)
    step = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    place = row[:, None] * (BLOCK // PER) + tl.arange(0, BLOCK // PER)[None, :]
    code = tl.load(codes + place, mask=place < code_bytes, other=0).to(tl.int32)
    if PER > 1:
        apart = (code[:, :, None] >> (BITS * tl.arange(0, PER))[None, None, :]) & ((1 << BITS) - 1)
        code = tl.reshape(apart, (ROWS, BLOCK))
    if KIND == "float" or KIND == "quantile":
        number = tl.load(numbers + code)
    elif KIND == "two":
        number = (2 * code - 3).to(tl.float32)
    elif BITS == 8:
        number = ((code ^ 128) - 128).to(tl.float32)
    else:
        number = code.to(tl.float32) - LARGEST
    value = number * step[:, None]
    if ROTATES:
        value = _rotated(value, ROWS, BLOCK)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if ADDS:
        value += tl.load(out + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(out + at, rounded_to(value, out.dtype.element_ty), mask=at < numel)


@triton.jit
def _rotated(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # the order of the sums is that of [Note: The order of the rotation's sums]
    parity = tl.arange(0, 32)[:, None] & tl.arange(0, 32)[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    hadamard = (1 - 2 * (parity & 1)).to(tl.float32)
    runs = tl.reshape(x * _ROOT_INVERSE, (ROWS * BLOCK // 32, 32))
    return tl.reshape(tl.dot(runs, hadamard, input_precision="ieee"), (ROWS, BLOCK))


@triton.jit
def rounded_to(value, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fp32 numbers in a floating dtype, rounded to the nearest even."""
    if dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, half, _NAN).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)
