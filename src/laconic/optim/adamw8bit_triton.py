"""AdamW8bit's step in triton: one launch for all parameters of a group, one program per block.

The kernel is bit-equal to the torch version for finite numbers. It does the same operations and rounds each once, so it
fuses no multiply-adds and takes correctly rounded roots and quotients. Reference: `_step_8bit` in optim/adamw8bit.py.

[Note: One launch]
A launch costs the host more than a small matrix costs the device. So the addresses and sizes of all parameters travel
in one table, and a program reads the row of the parameter that its block belongs to. Tables are kept: in a steady run
the caching allocator gives gradients the addresses of an earlier step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codec.tiles import Grid
from laconic.optim.dynamic_map import DITHER_BITS, DITHER_FACTORS, dither_offset, dynamic_map

_FIRST: tl.constexpr = tl.constexpr(DITHER_FACTORS[0])
_SECOND: tl.constexpr = tl.constexpr(DITHER_FACTORS[1])
_SHIFT: tl.constexpr = tl.constexpr(32 - DITHER_BITS)
_MASK: tl.constexpr = tl.constexpr(2**DITHER_BITS - 1)
_UNIT: tl.constexpr = tl.constexpr(2.0**-DITHER_BITS)

_MAX_BLOCK_NUMEL = 4096  # more elements would not fit into a program's registers
_WIDTH: tl.constexpr = tl.constexpr(10)
"""The numbers of a row: six addresses, rows, columns, blocks side by side, and the first block."""
_ALIGNMENT = 16
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


class ParameterStep(NamedTuple):
    """One parameter's part on this rank: see `_step_8bit` in optim/adamw8bit.py."""

    grid: Grid
    values: Tensor
    """(numel,), any floating dtype, as is the gradient."""
    gradient: Tensor
    moments: Sequence[Tensor]
    """The codes of both moments, (numel,), uint8."""
    scales: Sequence[Tensor]
    """Their scales, (number of blocks,), fp32."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The facts that are the same for all parameters of one launch."""
        columns = self.grid.matrix(self.values).shape[1]
        tensors = self.values, self.gradient, *self.moments
        is_aligned = columns % _ALIGNMENT == 0 and all(each.data_ptr() % _ALIGNMENT == 0 for each in tensors)
        return self.grid.height, self.grid.width, self.values.dtype, self.gradient.dtype, is_aligned

    @property
    def num_blocks(self) -> int:
        """The blocks, and so the programs."""
        return self.scales[0].numel()

    def row(self) -> list[int]:
        """The numbers of the table, but for the first block."""
        tensors = self.values, self.gradient, *self.moments, *self.scales
        sizes = *self.grid.matrix(self.values).shape, self.grid.matrix_of_scales(self.scales[0]).shape[1]
        return [*(each.data_ptr() for each in tensors), *sizes]


def supports(grid: Grid) -> bool:
    """True if the sides of a block are powers of two and its elements fit into registers."""
    numel = grid.height * grid.width
    return numel & (numel - 1) == 0 and grid.height & (grid.height - 1) == 0 and numel <= _MAX_BLOCK_NUMEL


def step_8bit(rule: Any, steps: Sequence[ParameterStep]) -> None:
    """Take one step by `rule` on parameters of one device, in place: [Note: One launch]."""
    by_kind: dict[tuple[Any, ...], list[ParameterStep]] = {}
    for each in steps:
        if each.num_blocks:
            own = each._replace(gradient=each.gradient.contiguous())
            by_kind.setdefault(own.kind, []).append(own)
    for kind, group in by_kind.items():
        _launch(rule, group, *kind)


def _launch(
    rule: Any,
    steps: list[ParameterStep],
    height: int,
    width: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    aligned: bool,
) -> None:
    device = steps[0].values.device
    firsts = list(itertools.accumulate((each.num_blocks for each in steps), initial=0))
    rows = [number for each, first in zip(steps, firsts, strict=False) for number in (*each.row(), first)]
    maps = [dynamic_map(device, signed=signed) for signed in (True, False)]
    _step_blocks[(firsts[-1],)](
        _table(tuple(rows), device),
        _owners(tuple(each.num_blocks for each in steps), device),
        *(table for codebook in maps for table in (codebook.values, codebook.near)),
        rule.beta1,
        1 - rule.beta1,
        rule.beta2,
        1 - rule.beta2,
        rule.keep,
        rule.step_size,
        rule.root_factor,
        rule.eps,
        dither_offset(rule.step),
        LOWEST=maps[0].LOWEST,
        HIGHEST=maps[0].HIGHEST,
        VALUES=_TYPES[dtype],
        GRADIENT=_TYPES[grad_dtype],
        ALIGNED=aligned,
        HEIGHT=height,
        WIDTH=width,
        enable_fp_fusion=False,
    )


@lru_cache(maxsize=64)
def _table(rows: tuple[int, ...], device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _owners(num_blocks: tuple[int, ...], device: torch.device) -> Tensor:
    """The row of each block."""
    return torch.arange(len(num_blocks), dtype=torch.int32).repeat_interleave(torch.tensor(num_blocks)).to(device)


@triton.jit
def _step_blocks(  # type: ignore[no-untyped-def]  # triton types its arguments
    table,
    owners,
    signed_values,
    signed_near,
    unsigned_values,
    unsigned_near,
    beta1,
    rest1,
    beta2,
    rest2,
    keep,
    step_size,
    root_factor,
    eps,
    offset,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    VALUES: tl.constexpr,
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    own = table + tl.load(owners + program) * _WIDTH
    values = tl.load(own).to(tl.pointer_type(VALUES))
    gradient = tl.load(own + 1).to(tl.pointer_type(GRADIENT))
    exp_avg = tl.load(own + 2).to(tl.pointer_type(tl.uint8))
    exp_avg_sq = tl.load(own + 3).to(tl.pointer_type(tl.uint8))
    exp_avg_scale = tl.load(own + 4).to(tl.pointer_type(tl.float32))
    exp_avg_sq_scale = tl.load(own + 5).to(tl.pointer_type(tl.float32))
    rows = tl.load(own + 6)
    columns = tl.load(own + 7)
    wide = tl.load(own + 8)
    block = program - tl.load(own + 9)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        gradient = tl.multiple_of(gradient, 16)
        exp_avg = tl.multiple_of(exp_avg, 16)
        exp_avg_sq = tl.multiple_of(exp_avg_sq, 16)
        columns = tl.multiple_of(columns, 16)
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
    tl.store(values + at, stepped.to(VALUES), mask=inside)
    _store(m, exp_avg, exp_avg_scale + block, signed_values, signed_near, at, inside, salt, True, LOWEST, HIGHEST)
    _store(
        v, exp_avg_sq, exp_avg_sq_scale + block, unsigned_values, unsigned_near, at, inside, salt, False, LOWEST,
        HIGHEST,
    )  # fmt: skip


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    moment,
    codes,
    scale,
    values,
    near,
    at,
    inside,
    salt,
    SIGNED: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    """Encode one moment: [Note: Dithered rounding] and `DynamicMap.near` in optim/dynamic_map.py."""
    largest = tl.max(tl.abs(moment))
    tl.store(scale, largest)
    ratio = tl.div_rn(moment, tl.zeros_like(moment) + tl.where(largest == 0, 1.0, largest))
    bits = ratio.to(tl.int32, bitcast=True)
    upper = (bits >> 16) & 0x7FFF
    place = tl.minimum(tl.maximum(upper, LOWEST), HIGHEST) - LOWEST
    if SIGNED:
        place += tl.where(bits < 0, HIGHEST - LOWEST + 1, 0)
    below = tl.load(near + place).to(tl.int32)
    low = tl.load(values + below)
    middle = tl.load(values + below + 1)
    high = tl.load(values + tl.minimum(below + 2, 255))
    is_above = (middle < ratio) & (below < 254)  # the last number has no gap after it
    gap = tl.where(is_above, high - middle, middle - low)
    below += is_above.to(tl.int32)
    if not SIGNED:
        gap = tl.where(below == 0, 0.0, gap)  # only 0 rounds to 0
    dice = (bits + salt) * _FIRST
    dice = (dice ^ (dice >> 15)) * _SECOND
    dice = (dice >> _SHIFT) & _MASK
    border = gap * dice.to(tl.float32) * _UNIT + tl.where(is_above, middle, low)
    code = below + tl.where(ratio > border, 1, 0)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
