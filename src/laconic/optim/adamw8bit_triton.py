"""AdamW8bit's step in one triton kernel, one program per block, without temporaries in memory.

The kernel is bit-equal to the torch version for finite numbers. It does the same operations and rounds each once, so it
fuses no multiply-adds and takes correctly rounded roots and quotients. Reference: `_step_8bit` in optim/adamw8bit.py.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from laconic.codec.dynamic_map import DITHER_BITS, DITHER_FACTORS, dither_offset, dynamic_map
from laconic.codec.tiles import Grid

_FIRST: tl.constexpr = tl.constexpr(DITHER_FACTORS[0])
_SECOND: tl.constexpr = tl.constexpr(DITHER_FACTORS[1])
_SHIFT: tl.constexpr = tl.constexpr(32 - DITHER_BITS)
_MASK: tl.constexpr = tl.constexpr(2**DITHER_BITS - 1)
_UNIT: tl.constexpr = tl.constexpr(2.0**-DITHER_BITS)

_MAX_BLOCK_NUMEL = 4096  # more elements would not fit into a program's registers


def step_8bit(
    rule: Any, grid: Grid, values: Tensor, gradient: Tensor, moments: list[Tensor], scales: list[Tensor]
) -> None:
    """Take one step on a rank's flat part, in place. The arguments are those of `_step_8bit` in optim/adamw8bit.py.

    Shapes: `values` (the parameter) and `gradient` (numel,), any floating dtype. For both moments, codes (numel,),
    uint8, and scales (number of blocks,), fp32.
    """
    rows, columns = grid.matrix(values).shape
    high, wide = grid.matrix_of_scales(scales[0]).shape
    if not high * wide:
        return
    maps = [dynamic_map(values.device, signed=signed) for signed in (True, False)]
    _step_block[(high * wide,)](
        values,
        gradient.contiguous(),
        *moments,
        *scales,
        *(table for codebook in maps for table in (codebook.values, codebook.gaps)),
        rows,
        columns,
        wide,
        rule.beta1,
        1 - rule.beta1,
        rule.beta2,
        1 - rule.beta2,
        rule.keep,
        rule.step_size,
        rule.root_factor,
        rule.eps,
        dither_offset(rule.step),
        HEIGHT=grid.height,
        WIDTH=grid.width,
        enable_fp_fusion=False,
    )


def supports(grid: Grid) -> bool:
    """True if the sides of a block are powers of two and its elements fit into registers."""
    numel = grid.height * grid.width
    return numel & (numel - 1) == 0 and grid.height & (grid.height - 1) == 0 and numel <= _MAX_BLOCK_NUMEL


@triton.jit
def _step_block(  # type: ignore[no-untyped-def]  # triton types its arguments
    values,
    gradient,
    exp_avg,
    exp_avg_sq,
    exp_avg_scale,
    exp_avg_sq_scale,
    signed_values,
    signed_gaps,
    unsigned_values,
    unsigned_gaps,
    rows,
    columns,
    wide,
    beta1,
    rest1,
    beta2,
    rest2,
    keep,
    step_size,
    root_factor,
    eps,
    offset,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    block = tl.program_id(0)
    row = ((block // wide) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    column = (block % wide) * WIDTH + tl.arange(0, WIDTH)[None, :]
    salt = offset + tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    at = row * columns + column
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(signed_values + tl.load(exp_avg + at, mask=inside, other=0)) * tl.load(exp_avg_scale + block)
    v = tl.load(unsigned_values + tl.load(exp_avg_sq + at, mask=inside, other=0)) * tl.load(exp_avg_sq_scale + block)
    m = tl.where(inside, m * beta1 + g * rest1, 0.0)
    v = tl.where(inside, v * beta2 + (g * g) * rest2, 0.0)
    denominator = tl.sqrt_rn(v) * root_factor + eps
    p = tl.load(values + at, mask=inside, other=0.0)
    stepped = p.to(tl.float32) * keep - tl.div_rn(m, denominator) * step_size
    tl.store(values + at, stepped.to(p.dtype), mask=inside)
    _store(m, exp_avg, exp_avg_scale + block, signed_values, signed_gaps, at, inside, salt)
    _store(v, exp_avg_sq, exp_avg_sq_scale + block, unsigned_values, unsigned_gaps, at, inside, salt)


@triton.jit
def _store(moment, codes, scale, values, gaps, at, inside, salt):  # type: ignore[no-untyped-def]
    """Encode one moment: [Note: Dithered rounding] in codec/dynamic_map.py."""
    largest = tl.max(tl.abs(moment))
    tl.store(scale, largest)
    ratio = tl.div_rn(moment, tl.zeros_like(moment) + tl.where(largest == 0, 1.0, largest))
    below = tl.zeros(moment.shape, tl.int32)  # how many numbers after the first are smaller, by bisection
    for power in tl.static_range(8):
        half = 128 >> power
        below += tl.where(tl.load(values + below + half) < ratio, half, 0)
    below = tl.minimum(below, 254)  # the last number has no gap after it
    dice = (ratio.to(tl.int32, bitcast=True) + salt) * _FIRST
    dice = (dice ^ (dice >> 15)) * _SECOND
    dice = (dice >> _SHIFT) & _MASK
    border = tl.load(gaps + below) * dice.to(tl.float32) * _UNIT + tl.load(values + below)
    code = below + tl.where(ratio > border, 1, 0)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
