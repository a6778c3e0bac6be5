"""Contexts, which both sides know before a difference is coded, and the table of their codes.

[Note: Lossless differences] in codec/lossless.py says why.

A context is class x RANKS + rank. An entry of the table is the code of a context, plus FLIP and PREDICT.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.fused import kept
from laconic.codec.patterns import PatternForm, bit_length, zigzag_of

BLOCK = 512
"""The values that share a scale."""
TILE = 4096
"""The values with words of their own."""
CLASSES, RANKS = 24, 8
IDLE = CLASSES * RANKS
"""The context of values whose block has not changed; contexts are class x RANKS + rank."""
RICE_CODES, RAW, NONE, BUCKETS = 14, 14, 15, 16
"""Codes: 0 to 13 is Rice with so many low bits; RAW is for the tiles that are sent as patterns, NONE for idle values;
BUCKETS + m is a bucket of 2**m values."""
BUCKET_BITS = (1, 2, 3, 4, 6, 8, 10)
"""The sizes of buckets, m. Those between cost at most 0.007 bits a value less."""
CODE, FLIP, PREDICT = 31, 32, 64
"""The bits of a table's entry: the code, minus comes first, and the last difference is taken off."""
MAX_QUOTIENT, MAX_EVENTS = 16, 4
"""The unary number, and the events of a value, that mean: the pattern follows."""
RARE = 16
"""Contexts with fewer values in the sample have no entry in the table, but `defaults`."""
MAX_LEVEL = 15
LOWEST_BASE = -MAX_LEVEL
"""Of the scales of a tile. The highest is 255 above, so a byte holds each."""
STEP_BITS = 12
"""The bits below one ulp in the sum of a block."""
MAX_STEP = (8 << STEP_BITS) - 1
"""Of one value in that sum, so that a jump says little about its block."""
_ZERO_CLASS = 9  # log2(BLOCK): the class of a mean step of one ulp
_DEFAULT_BUCKETS = (10, 8, 6, 6, 4, 4, 3, 2)  # of the classes below
EXACT_BINS, BINS = 16, 64
_FIRST_LARGE_BIN = 2 * EXACT_BINS + 1
_MAX_VALUE = (1 << 16) + 128  # of a difference less its prediction
COST_UNITS = 1 << max(BUCKET_BITS)
"""Of a bit, in which costs are counted: a value's share of a bucket's bit is a whole number of them."""


def in_tiles(values: Tensor) -> Tensor:
    """The values, filled up with zeros, as (tiles, TILE)."""
    missing = -len(values) % TILE
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, TILE)


def sample_stride(num_tiles: int) -> int:
    """Of every so many tiles the first is in the sample by which codes are chosen, so of t tiles some 2 sqrt(t)."""
    return (math.isqrt(num_tiles) + 1) // 2


class Past(NamedTuple):
    """The size and the direction of the last difference of each value, (t, TILE), int32; plain numbers if unknown."""

    rank: Tensor | int
    sign: Tensor | int
    prediction: Tensor | int
    """The difference to expect, counted in the direction of the last one."""

    def of_tiles(self, stride: int) -> Past:
        """Those of the first of every `stride` tiles."""
        return Past(*(each if isinstance(each, int) else each[::stride] for each in self))


def past_of(last: Tensor | None) -> Past:
    """Look up last differences, (n,), int8, of values in tiles."""
    if last is None:
        return Past(0, 1, 0)
    tiles = in_tiles(last)
    index = tiles.view(-1).to(torch.int32) + 128
    return Past(*(each.index_select(0, index).view_as(tiles) for each in past_tables(last.device)))


@kept
def past_tables(device: torch.device) -> Tensor:
    """Rank, sign and prediction for each last difference from -128 on, (3, 256), int32."""
    last = torch.arange(-128, 128, dtype=torch.int32, device=device)
    size = last.abs()
    rank = torch.where(size > 2, bit_length(size) + 1, size).clamp_(max=RANKS - 1)
    return torch.stack([rank, torch.where(last < 0, -1, 1), (230 * size + 128) >> 8]).to(torch.int32)


def scales_of(moved: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """The level of each block, and the base of each tile: (t, blocks) and (t,), int32.

    A level is 0 if nothing has changed, else, from 1, log2 of the block's sum of steps, less the base.
    """
    sizes, exponents = moved.abs().view(-1, BLOCK), exponents.view(-1, BLOCK)
    top = exponents.amax(1)
    steps = (sizes << STEP_BITS) >> (top.unsqueeze(1) - exponents).clamp_(max=30)
    total = steps.clamp_(max=MAX_STEP).sum(1, dtype=torch.int32)
    is_changed = (sizes.amax(1) > 0).view(-1, TILE // BLOCK)
    scale = (top - STEP_BITS + bit_length(total)).view_as(is_changed)
    highest = torch.where(is_changed, scale, LOWEST_BASE).amax(1)
    base = (highest - MAX_LEVEL).clamp_(LOWEST_BASE, LOWEST_BASE + 255)
    return ((scale - base.unsqueeze(1)).clamp_(1, MAX_LEVEL) * is_changed).to(torch.int32), base


def contexts_of(exponents: Tensor, levels: Tensor, base: Tensor, past: Past, numel: int) -> Tensor:
    """The context of each value, (t, TILE), int32; those from `numel` on, which only fill up a tile, are idle."""
    scales = (levels + base.unsqueeze(1)).view(-1, 1)
    classes = (scales - exponents.view(-1, BLOCK)).clamp_(0, CLASSES - 1)
    context = classes.mul_(RANKS).view_as(exponents)
    if not isinstance(past.rank, int):
        context += past.rank
    context = context.view(-1, BLOCK).clamp_(min=((levels == 0) * IDLE).view(-1, 1)).view_as(exponents)
    context.view(-1)[numel:] = IDLE
    return context


def occurrences(index: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs, (size,), int32."""
    ones = torch.ones(1, dtype=torch.int32, device=index.device).expand(len(index))
    return torch.zeros(size, dtype=torch.int32, device=index.device).index_add_(0, index, ones)


def choose_codes(form: PatternForm, context: Tensor, folded: Tensor, past: Past) -> Tensor:
    """The entry of each context that takes the fewest bits for a sample, (IDLE,), int32; of rare ones the default.

    Shapes: contexts and differences in the direction of the last ones (t, TILE).
    """
    rest = None if isinstance(past.prediction, int) else histogram_of(context, folded - past.prediction)
    return best_codes(form, histogram_of(context, folded), rest)


def best_codes(form: PatternForm, histogram: Tensor, rest: Tensor | None) -> Tensor:
    """See `choose_codes`; by the `histogram_of` differences, and that of what predictions leave of them."""
    entries, costs = options_of(form.bits, histogram.device)
    bits, chosen = (histogram.double() @ costs.double()).min(1)  # sums of whole numbers, which fp64 holds
    table = entries.index_select(0, chosen)
    if rest is not None:
        fewer, chosen = (rest.double() @ costs[:, : 2 * RICE_CODES].double()).min(1)
        table = torch.where(fewer < bits, entries.index_select(0, chosen) | PREDICT, table)
    return torch.where(histogram.sum(1) < RARE, defaults(table.device), table)


def histogram_of(context: Tensor, values: Tensor) -> Tensor:
    """The values of each context by bin, (IDLE, BINS), int32.

    Values up to 16 have bins of their own; larger ones share one with those of as many bits and the same sign.
    """
    bins = _bins(context.device).index_select(0, values.reshape(-1) + _MAX_VALUE).view_as(context)
    return occurrences((context * BINS + bins).view(-1), (IDLE + 1) * BINS).view(-1, BINS)[:IDLE]


@kept
def _bins(device: torch.device) -> Tensor:
    """The bin of each value from -_MAX_VALUE on, int32."""
    values = torch.arange(-_MAX_VALUE, _MAX_VALUE + 1, dtype=torch.int32, device=device)
    sizes = values.abs()
    large = 2 * (bit_length(sizes) - EXACT_BINS.bit_length()) + (values < 0) + _FIRST_LARGE_BIN
    return torch.where(sizes > EXACT_BINS, large, values + EXACT_BINS).to(torch.int32)


@kept
def options_of(pattern_bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The entries to choose from, (o,), and the COST_UNITS that a value of each bin takes with them, (BINS, o), int32.

    Those of Rice codes come first. A bucket costs a bit for each 2**m values.
    """
    bins = torch.arange(BINS)
    beyond = bins - _FIRST_LARGE_BIN
    large = (3 << (beyond // 2 + EXACT_BINS.bit_length() - 2).clamp_(min=0)) * (1 - 2 * (beyond % 2))
    values = torch.where(beyond >= 0, large, bins - EXACT_BINS)  # of a large bin one amid the others
    options: list[tuple[int, Tensor]] = []
    for flip in (0, FLIP):
        zigzag = zigzag_of(-values if flip else values)
        for k in range(RICE_CODES):
            quotient = zigzag >> k
            escape = MAX_QUOTIENT + 1 + pattern_bits
            bits = torch.where(quotient < MAX_QUOTIENT, quotient + 1 + k, escape)
            options.append((k | flip, COST_UNITS * bits))
    for m in BUCKET_BITS:
        events = values.abs().clamp(max=MAX_EVENTS)
        bits = events * (m + 2) + (events == MAX_EVENTS) * pattern_bits
        options.append((BUCKETS + m, (COST_UNITS >> m) + COST_UNITS * bits))
    entries, costs = zip(*options, strict=True)
    of_bins = torch.stack(costs, dim=1).to(torch.int32)
    return torch.tensor(entries, dtype=torch.int32, device=device), of_bins.to(device)


@kept
def defaults(device: torch.device) -> Tensor:
    """The entries of rare contexts, (IDLE,), int32: a code for the steps that the class says."""
    context = torch.arange(IDLE, dtype=torch.int32, device=device)
    beyond = context // RANKS - _ZERO_CLASS
    buckets = BUCKETS + torch.tensor([*_DEFAULT_BUCKETS, *[0] * CLASSES], device=device)[context // RANKS]
    rice = beyond.clamp(0, RICE_CODES - 1) + PREDICT * (context % RANKS > 1)
    return torch.where(beyond < -1, buckets, rice).to(torch.int32)
