"""States in 8 bits: blocks of the global tensor, each with one scale, coded by the dynamic map.

A block is a block of the *global* tensor, so what is stored does not depend on how many ranks share the tensor; a rank
that holds whole blocks quantises without asking anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

DITHER_FACTORS = (-2048144789, -1028477387)
"""What is hashed, an int32, is multiplied by the first, combined with itself shifted by 15 bits, and multiplied by the
second, modulo 2^32: the finish of MurmurHash3."""
DITHER_BITS = 12
"""Of the hash, from the top, are the dice: few enough that a border lies truly below the next code."""

_DITHER_STRIDE = 0x85EBCA6B
_NUM_CODES = 256
_PANEL_NUMEL = 2**18
"""Elements that are worked on at a time: some 1 MiB in fp32 for each temporary."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Which elements share a scale."""

    tile: int | None = 32
    """Matrices are cut into tile x tile tiles, those at the edges smaller. All dims of a tensor but the last are taken
    as one. None: matrices are cut like vectors."""
    flat: int = 256
    """Vectors are cut into runs of so many elements, the last one shorter."""

    def __post_init__(self) -> None:
        for name, value in {"tile": self.tile, "flat": self.flat}.items():
            if value is not None and value < 1:
                raise ValueError(f"Tiling.{name}={value} must be at least 1")

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """The blocks of a tensor of this global shape."""
        if self.tile is None or len(shape) < 2:
            return Grid(shape=shape, columns=None, height=1, width=self.flat)
        return Grid(shape=shape, columns=shape[-1], height=self.tile, width=self.tile)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One tensor's blocks of height x width elements.

    Shapes: the tensor's whole blocks on a rank, seen as a matrix of (rows, columns); with `columns` None as one row.
    """

    shape: tuple[int, ...]
    """Global."""
    columns: int | None
    height: int
    width: int

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Global shape of the tensor of scales, one per block."""
        numel = math.prod(self.shape)
        if self.columns is None:
            return (-(-numel // self.width),)
        return (-(-numel // (self.columns * self.height)), -(-self.columns // self.width))

    @property
    def uncut(self) -> int:
        """Elements that must lie on one rank: the flat run from a block's first element to its last."""
        return min(self.width if self.columns is None else self.columns * self.height, math.prod(self.shape))

    @property
    def scales_per_run(self) -> int:
        """Scales of one such run."""
        return 1 if self.columns is None else self.scales_shape[1]

    def matrix(self, local: Tensor) -> Tensor:
        """A rank's flat part as the matrix that blocks are cut from; a view."""
        return local.view(1, -1) if self.columns is None else local.view(-1, self.columns)

    def matrix_of_scales(self, local: Tensor) -> Tensor:
        """The scales of `matrix`, one per block; a view."""
        return local.view(1, -1) if self.columns is None else local.view(-1, self.scales_per_run)

    def panels(self, scales: Tensor) -> Iterator[Panel]:
        """Cut the matrix whose blocks have these scales into panels of whole blocks, of bounded size."""
        high, wide = scales.shape
        across = min(wide, max(1, _PANEL_NUMEL // (self.height * self.width)))
        down = max(1, _PANEL_NUMEL // (self.height * self.width * max(1, across)))
        for top in range(0, high, down):
            for left in range(0, wide, max(1, across)):
                yield Panel(self, slice(top, min(top + down, high)), slice(left, min(left + across, wide)))


class Panel:
    """Some neighbouring blocks of a matrix."""

    def __init__(self, grid: Grid, down: slice, across: slice) -> None:
        """`down` and `across` count blocks."""
        self.grid, self.scales = grid, (down, across)
        self.elements = (
            slice(down.start * grid.height, down.stop * grid.height),
            slice(across.start * grid.width, across.stop * grid.width),
        )
        self.shape = (down.stop - down.start, grid.height, across.stop - across.start, grid.width)

    def read(self, matrix: Tensor, fill: int = 0) -> Tensor:
        """The panel as (blocks down, height, blocks across, width); blocks at an edge are filled up. May be a view."""
        part = matrix[self.elements]
        missing = self.shape[0] * self.shape[1] - part.shape[0], self.shape[2] * self.shape[3] - part.shape[1]
        if any(missing):
            part = functional.pad(part, (0, missing[1], 0, missing[0]), value=fill)
        return part.reshape(self.shape)

    def write(self, matrix: Tensor, values: Tensor) -> None:
        """The reverse of `read`."""
        part = matrix[self.elements]
        if part.data_ptr() != values.data_ptr():  # else they were read as a view
            part.copy_(values.reshape(self.shape[0] * self.shape[1], -1)[: part.shape[0], : part.shape[1]])


def quantize(values: Tensor, code: DynamicCode, *, step: int) -> tuple[Tensor, Tensor]:
    """Divide each block by its largest magnitude and round to one of the two codes beside it.

    `step`: the optimizer's, for [Note: Dithered rounding].

    Shapes:
        values (a, height, b, width), fp32; overwritten -> codes, uint8, of the same shape, and scales (a, b), fp32.

    Reference: tests/reference/adamw8bit.py, bit-equal.
    """
    scales = values.abs().amax((1, 3))
    divisors = torch.where(scales == 0, 1.0, scales)
    _, height, _, width = values.shape
    place = torch.arange(height * width, device=values.device, dtype=torch.int32).view(1, height, 1, width)
    return code.rounded(values.div_(divisors[:, None, :, None]), place + dither_offset(step)), scales


def dither_offset(step: int) -> int:
    """What a step adds to the hash, an int32."""
    return (step * _DITHER_STRIDE + 2**31) % 2**32 - 2**31


def dequantize(codes: Tensor, scales: Tensor, code: DynamicCode) -> Tensor:
    """Shapes: codes (a, height, b, width), uint8, and scales (a, b) -> fp32 values (a, height, b, width)."""
    index = codes.reshape(-1).to(torch.int32)
    return code.values.index_select(0, index).view(codes.shape).mul_(scales[:, None, :, None])


class DynamicCode:
    """256 numbers of magnitude up to 1 that lie close together near 0: the dynamic tree map of 8-bit optimizers.

    Seven decades from 1e-7 to 1; the k-th has 2^k numbers (2^(k + 1) without a sign), the midpoints of as many equal
    parts of it; and 0, and 1. The unsigned map is for second moments, which stand below a root in a denominator: there
    only 0 itself becomes 0, and what lies between 0 and the first code takes the first.

    [Note: Dithered rounding] A moment decays by a few per cent a step, small codes lie up to a few ten per cent apart:
    rounded to the nearest, small moments would stand where they are and never decay, and second moments that are too
    large slow training down. So a number goes up or down with the probability that keeps its mean. The dice are a hash
    of the number's bits, its place in the block and the step: the same however many ranks there are.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861; rounding is our own.
    """

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        self.values = torch.tensor(dynamic_map(signed=signed), device=device)
        """(256,), ascending."""
        self.zero = int((self.values == 0).nonzero())
        """The code of 0."""
        self.gaps = self.values.diff()
        """(255,): from each number to the next one."""
        if not signed:
            self.gaps[0] = 0.0
        # A search per number is slow. Its upper 16 bits, which are its bfloat16, leave at most two codes below it: the
        # first one of all numbers that share them, and the next one, which begins above `_next`.
        above = self.values[1:]
        upper = torch.arange(2**16, device=device, dtype=torch.int32) << 16
        ends = upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)
        first = torch.bucketize(torch.fmin(*ends), above).clamp_(max=_NUM_CODES - 2)
        assert (torch.bucketize(torch.fmax(*ends), above).clamp_(max=_NUM_CODES - 2) - first).max() <= 1
        self._first = first.to(torch.int32)
        self._next = above[first]

    def rounded(self, values: Tensor, salt: Tensor) -> Tensor:
        """Codes, uint8, of contiguous fp32 values in [-1, 1]; one that a code stands for gets this code.

        Shapes: values any; salt, int32, goes into the dice and broadcasts to it.
        """
        flat = values.view(-1)
        bits = flat.view(torch.int32)
        upper = bits.bitwise_right_shift(16).bitwise_and_(0xFFFF)
        below = self._first.index_select(0, upper)
        below += flat > self._next.index_select(0, upper)
        dice = (values.view(torch.int32) + salt).view(-1).mul_(DITHER_FACTORS[0])
        dice = dice.bitwise_xor_(dice.bitwise_right_shift(15)).mul_(DITHER_FACTORS[1])
        dice.bitwise_right_shift_(32 - DITHER_BITS).bitwise_and_(2**DITHER_BITS - 1)
        borders = self.gaps.index_select(0, below).mul_(dice).mul_(2.0**-DITHER_BITS)
        borders += self.values.index_select(0, below)
        below += flat > borders
        return below.to(torch.uint8).view(values.shape)


@cache
def dynamic_code(device: torch.device, *, signed: bool) -> DynamicCode:
    """The map's tables on a device."""
    return DynamicCode(signed=signed, device=device)


def dynamic_map(*, signed: bool) -> list[float]:
    """The 256 numbers of a `DynamicCode`, ascending, each representable in fp32."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade - 6) for part in range(parts)]
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32).tolist()
