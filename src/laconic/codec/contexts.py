"""Contexts, which both sides know before a difference is coded, and the table of their codes.

[Note: Lossless differences] in codec/lossless.py says why.

A context is class x RANKS + rank. An entry of the table is the code of a context, plus FLIP and PREDICT.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.blocked import kept
from laconic.codec.patterns import PatternForm, bit_length, zigzag_of

BLOCK = 512
"""The values that share a scale."""
TILE = 8192
"""The values with words of their own."""
CLASSES, RANKS = 24, 8
IDLE = CLASSES * RANKS
"""The context of values whose block has not changed; contexts are class x RANKS + rank."""
RICE_CODES, RAW, NONE, BUCKETS, MAX_BUCKET_BITS = 14, 14, 15, 16, 12
"""Codes: 0 to 13 is Rice with so many low bits, RAW, NONE, and BUCKETS + m is a bucket of 2**m values, m from 1."""
CODE, FLIP, PREDICT = 31, 32, 64
"""The bits of a table's entry: the code, minus comes first, and the last difference is taken off."""
MAX_QUOTIENT, MAX_EVENTS = 16, 4
"""The unary number, and the events of a value, that mean: the pattern follows."""
RARE = 16
"""Contexts with fewer values have no entry in the table, but `_defaults`."""
_MAX_LEVEL = 15
_STEP_BITS = 12  # the bits below one ulp in the sum of a block
_MAX_STEP = (8 << _STEP_BITS) - 1  # of one value in that sum, so that a jump says little about its block
_ZERO_CLASS = 9  # log2(BLOCK): the class of a mean step of one ulp
_EXACT_BINS, _BINS = 16, 64
_FIRST_LARGE_BIN = 2 * _EXACT_BINS + 1
_MAX_VALUE = (1 << 16) + 128  # of a difference less its prediction


def in_tiles(values: Tensor) -> Tensor:
    """The values, filled up with zeros, as (tiles, TILE)."""
    missing = -len(values) % TILE
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, TILE)


class Past(NamedTuple):
    """The size and the direction of the last difference of each value, (t, TILE), int32; plain numbers if unknown."""

    rank: Tensor | int
    sign: Tensor | int
    prediction: Tensor | int
    """The difference to expect, counted in the direction of the last one."""


def past_of(last: Tensor | None, like: Tensor) -> Past:
    """Look up last differences, (n,), int8, for values in tiles like `like`."""
    if last is None:
        return Past(0, 1, 0)
    index = in_tiles(last).view(-1).to(torch.int32) + 128
    return Past(*(each.index_select(0, index).view_as(like) for each in _past_tables(last.device)))


@kept
def _past_tables(device: torch.device) -> Tensor:
    """Rank, sign and prediction for each last difference from -128 on, (3, 256), int32."""
    last = torch.arange(-128, 128, dtype=torch.int32, device=device)
    size = last.abs()
    rank = torch.where(size > 2, bit_length(size) + 1, size).clamp_(max=RANKS - 1)
    return torch.stack([rank, torch.where(last < 0, -1, 1), (230 * size + 128) >> 8]).to(torch.int32)


def scales_of(moved: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """The level of each block, 0 if nothing has changed, else from 1: log2 of its sum of steps, less the base."""
    sizes, exponents = moved.abs().view(-1, BLOCK), exponents.view(-1, BLOCK)
    top = exponents.amax(1)
    steps = (sizes << _STEP_BITS) >> (top.unsqueeze(1) - exponents).clamp_(max=30)
    total = steps.clamp_(max=_MAX_STEP).sum(1, dtype=torch.int32)
    scale = top - _STEP_BITS + bit_length(total)
    is_changed = sizes.amax(1) > 0
    base = torch.where(is_changed, scale, -_MAX_LEVEL).amax() - _MAX_LEVEL
    return torch.where(is_changed, (scale - base).clamp_(1, _MAX_LEVEL), 0).to(torch.int32), base


def contexts_of(exponents: Tensor, levels: Tensor, base: Tensor, past: Past, numel: int) -> Tensor:
    """The context of each value, (t, TILE), int32; those from `numel` on, which only fill up a tile, are idle."""
    by_block = exponents.view(-1, BLOCK)
    level = functional.pad(levels, (0, len(by_block) - len(levels))).unsqueeze(1)
    classes = (level + base - by_block).clamp_(0, CLASSES - 1)
    context = (classes * RANKS).view_as(exponents) + past.rank
    context.view(-1, BLOCK).masked_fill_(level == 0, IDLE)
    context.view(-1)[numel:] = IDLE
    return context


def occurrences(index: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs, (size,), int32."""
    ones = torch.ones(1, dtype=torch.int32, device=index.device).expand(len(index))
    return torch.zeros(size, dtype=torch.int32, device=index.device).index_add_(0, index, ones)


def choose_codes(form: PatternForm, context: Tensor, folded: Tensor, past: Past) -> tuple[Tensor, Tensor]:
    """The entry of each context that takes the fewest bits, and whether it is sent: (IDLE + 1,) each."""
    entries, costs = _options(form.bits, context.device)
    histogram = _histogram(context, folded)
    bits, chosen = (histogram @ costs).min(1)
    table = entries.index_select(0, chosen)
    if not isinstance(past.prediction, int):
        rest = _histogram(context, folded - past.prediction)
        fewer, chosen = (rest @ costs[:, : 2 * RICE_CODES]).min(1)
        table = torch.where(fewer < bits, entries.index_select(0, chosen) | PREDICT, table)
    return with_defaults(table, histogram.sum(1))


def _histogram(context: Tensor, values: Tensor) -> Tensor:
    """The values of each context by bin, (IDLE + 1, bins), fp64, in which sums of whole numbers are exact.

    Values up to 16 have bins of their own; larger ones share one with those of as many bits and the same sign.
    """
    bins = _bins(context.device).index_select(0, values.view(-1) + _MAX_VALUE).view_as(context)
    return occurrences((context * _BINS + bins).view(-1), (IDLE + 1) * _BINS).view(-1, _BINS).double()


@kept
def _bins(device: torch.device) -> Tensor:
    """The bin of each value from -_MAX_VALUE on, int32."""
    values = torch.arange(-_MAX_VALUE, _MAX_VALUE + 1, dtype=torch.int32, device=device)
    sizes = values.abs()
    large = 2 * (bit_length(sizes) - _EXACT_BINS.bit_length()) + (values < 0) + _FIRST_LARGE_BIN
    return torch.where(sizes > _EXACT_BINS, large, values + _EXACT_BINS).to(torch.int32)


@kept
def _options(pattern_bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The entries to choose from, (o,), int32, and the bits that a value of each bin takes with them, (bins, o), fp64.

    Those of Rice codes come first. A bucket costs a bit for each 2**m values.
    """
    bins = torch.arange(_BINS)
    beyond = bins - _FIRST_LARGE_BIN
    large = (3 << (beyond // 2 + _EXACT_BINS.bit_length() - 2).clamp_(min=0)) * (1 - 2 * (beyond % 2))
    values = torch.where(beyond >= 0, large, bins - _EXACT_BINS)  # of a large bin one amid the others
    options: list[tuple[int, Tensor]] = []
    for flip in (0, FLIP):
        zigzag = zigzag_of(-values if flip else values)
        for k in range(RICE_CODES):
            quotient = zigzag >> k
            escape = MAX_QUOTIENT + 1 + pattern_bits
            options.append((k | flip, torch.where(quotient < MAX_QUOTIENT, quotient + 1 + k, escape)))
    options += [(RAW, torch.full_like(bins, pattern_bits)), (NONE, (values != 0) << 20)]
    for m in range(1, MAX_BUCKET_BITS + 1):
        events = values.abs().clamp(max=MAX_EVENTS)
        options.append((BUCKETS + m, 2.0**-m + events * (m + 2) + (events == MAX_EVENTS) * pattern_bits))
    entries, costs = zip(*options, strict=True)
    return torch.tensor(entries, dtype=torch.int32, device=device), torch.stack(
        [each.double() for each in costs], dim=1
    ).to(device)


def with_defaults(table: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The table with what both sides know for rare contexts, and whether each context has an entry of its own."""
    is_sent = counts >= RARE
    is_sent[IDLE] = False
    return torch.where(is_sent, table, _defaults(table.device)), is_sent


@kept
def _defaults(device: torch.device) -> Tensor:
    """The entries of rare contexts, (IDLE + 1,), int32: a Rice code for the steps that the class says."""
    context = torch.arange(IDLE + 1, dtype=torch.int32, device=device)
    table = (context // RANKS - _ZERO_CLASS).clamp_(0, RICE_CODES - 1)
    table += PREDICT * (context % RANKS > 1)
    table[IDLE] = NONE
    return table
