"""Weights that others hold in an older version, without loss, in the bits of their differences: `encode`, `decode`.

[Note: Lossless differences]
Receivers hold the last 16-bit or 8-bit pattern of every weight. Between two steps most patterns move by few units in
the last place (ulps) or not at all, so the owner sends that. Both sides know much about each difference beforehand:

    scale       An optimizer's step has nearly one size for the weights of a block, but an ulp depends on the exponent.
                One number of four bits for each block of 512 weights is the logarithm of the step. It and the exponent
                of the *held* pattern give the size of the difference in ulps, to a factor of two: 24 classes.
    past        The last difference, where both sides keep it. Momentum makes the next one alike while steps are many
                ulps long. Where they are short, a pattern that has just moved seldom moves again, and by its sign.
                So there are 8 ranks of its size; differences are counted in its direction.

A class and a rank make a context. Nothing else about a value is known, so values of one context share one code, which
the payload's table names in a byte. It is chosen by a histogram of each context, whose bits are counted for every code:

    Rice k      k low bits of the zigzag number of the difference, and the rest as a unary number. The table says, too,
                whether 0.9 times the last difference is taken off first, and which sign comes first in the zigzag.
    bucket m    For contexts that seldom change. The values of a tile with an equal m, in order, make buckets of 2**m. A
                unary number counts the events of a bucket, and each event has m bits for the place in the bucket and a
                sign. A change by two ulps is two events of one value. This is the code of Elias and Fano.
    none, raw   Contexts that never change, and those with no better code than their patterns.

What happens once in a while costs a bounded number of bits: from the 16th unit of a quotient, or the fourth event of a
value, its pattern follows. A block that does not change costs its four bits. A payload as long as the new values *is*
the new values, and none is longer. Zeros of both signs, infinities and NaNs are patterns like others. The codes are 0.1
to 0.15 bits above the entropy under the same contexts, of which a code of whole bits for each value cannot have less.

[Note: Codes that decode in parallel]
Every tile of 8,192 values has its own words, whose numbers are in the head of the payload, so that tiles are coded each
by itself. A tile has two runs of bits. The unary numbers of all its values and buckets stand in one run: so many zeros
and a one. The place of the i-th one says all, so a scan decodes them. The other run has the fields: the low bits of all
values in order, then those of events, then the patterns of values with four events. The widths of fields follow from
contexts and unary numbers, so their offsets are a running sum. Nothing waits for a value before it. What either side
decides is whole-number arithmetic, so payloads have the same bytes on every device.

On a CPU both sides are some sixty operations on all values. They read sizes from the device, as `nonzero` does, where
the work depends on what changes; `encode` must know the length of its payload anyhow.

    payload     base of the scales, int16 | for each tile the words of its unary run and of its fields, uint16 each |
                scales, 4 bits each | the table, a byte for each context with 16 values or more | zeros up to a
                multiple of four bytes | the unary runs of all tiles | their fields; in words of 32 bits
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.blocked import _kept
from laconic.codec.patterns import (
    WORD_BITS,
    PatternForm,
    bit_length,
    pattern_form_of,
    positions_of_ones,
    read_fields,
    write_fields,
    write_ones,
)

BLOCK = 512
"""The values that share a scale."""
TILE = 8192
"""The values with words of their own."""
MAX_NUMEL = 1 << 25
"""The values of a payload: offsets of bits then fit into 31 bits."""
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
_COLUMNS = 16  # of a tile: values with Rice codes, those in buckets of 2**1, 2**2, ..., and at the last all others
_EXACT_BINS, _BINS = 16, 64
_FIRST_LARGE_BIN = 2 * _EXACT_BINS + 1


def last_difference(held: Tensor, new: Tensor, *, form: PatternForm | None = None) -> Tensor:
    """The ulps by which patterns have moved, for the next call of `encode` and `decode`: (n,), int8, up to +-127."""
    form = form or pattern_form_of(held.dtype)
    moved = form.numbers(form.patterns(new)) - form.numbers(form.patterns(held))
    return moved.clamp_(-127, 127).to(torch.int8)


def encode(held: Tensor, new: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None) -> Tensor:
    """Encode new values for those who hold others, as a payload of its own length: [Note: Lossless differences].

    Args:
        held: the values that receivers hold, flat, of at most 2**25 patterns of 16 bits or fewer.
        new: the new values, of the same dtype, shape and device.
        last: `last_difference` between the held values and those before them, if receivers know it.
        form: how to read patterns. Default: that of the dtype, and plain bytes for uint8.

    Returns:
        (bytes,), uint8: never longer than `new`.

    Raises:
        ValueError: tensors do not fit each other, or have a dtype without a form, or there are too many values.
    """
    form = _checked(held, last, form, new)
    raw = new.view(torch.uint8)
    if not held.numel():
        return raw.clone()
    patterns = _in_tiles(form.patterns(new))
    context, moved, levels, base, past = _difference(form, held, patterns, last)
    table, is_sent = _choose(form, context, moved * past.sign, past)
    entries = table.index_select(0, context.view(-1)).view_as(context)
    head = [_bytes(base.to(torch.int16).view(1))]
    unary, fields, lengths = _write(form, entries, patterns, moved, past)
    head += [_bytes(lengths.to(torch.int16).view(-1)), _pairs(levels), table[is_sent].to(torch.uint8)]
    filling = raw.new_zeros(-sum(map(len, head)) % 4)
    payload = torch.cat([*head, filling, _bytes(unary.to(torch.int32)), _bytes(fields.to(torch.int32))])
    return payload if len(payload) < len(raw) else raw.clone()


def decode(held: Tensor, payload: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None) -> Tensor:
    """Decode what `encode` returned for the same held values and last differences: the new values, to the bit.

    Raises:
        ValueError: tensors do not fit each other, or the payload is not one of so many values.
    """
    form = _checked(held, last, form)
    if len(payload) == held.numel() * held.element_size():
        return payload.clone().view(held.dtype)
    numel = form.numel(held)
    head = _Head.of(payload, numel)
    old = _in_tiles(form.patterns(held))
    past = _past(last, old)
    context = _contexts(form, old, head.levels, head.base, past, numel)
    counts = _counts(context.view(-1), IDLE + 1)
    table, is_sent = _with_defaults(torch.zeros_like(counts), counts)
    sent = is_sent.nonzero().view(-1)
    begin = head.nbytes + len(sent)
    first = begin + -begin % 4
    num_unary, num_fields = head.lengths.sum(0).tolist()
    _check_sizes(len(payload) == first + 4 * (num_unary + num_fields))
    table[sent] = payload[head.nbytes : begin].to(torch.int32)
    words = payload[first:].clone().view(torch.int32)
    entries = table.index_select(0, context.view(-1)).view_as(context)
    patterns = _read(form, entries, old, words[:num_unary], words[num_unary:], head.lengths, past)
    return form.tensor(patterns.view(-1)[:numel], held.dtype)


def _checked(held: Tensor, last: Tensor | None, form: PatternForm | None, new: Tensor | None = None) -> PatternForm:
    form = form or pattern_form_of(held.dtype)
    numel = form.numel(held)
    if held.ndim != 1 or numel > MAX_NUMEL:
        raise ValueError(
            f"lossless differences are those of flat tensors of at most {MAX_NUMEL} values, got shape "
            f"{tuple(held.shape)}; use x.view(-1), and code long tensors in pieces"
        )
    if new is not None and (new.dtype, new.shape) != (held.dtype, held.shape):
        raise ValueError(
            f"new values of {new.dtype}, shape {tuple(new.shape)}, have no difference to held ones of {held.dtype}, "
            f"shape {tuple(held.shape)}; pass two versions of one tensor"
        )
    if last is not None and (last.dtype, last.shape) != (torch.int8, (numel,)):
        raise ValueError(
            f"the last differences of {numel} values are as many int8 numbers, got {last.dtype}, shape "
            f"{tuple(last.shape)}; pass what last_difference returns"
        )
    return form


def _check_sizes(agree: bool | Tensor) -> None:
    if not agree:
        raise ValueError(
            "a payload of lossless differences does not fit the held values: it is damaged, or `held` or `last` differ "
            "from those that encode got; send the values themselves"
        )


def _in_tiles(values: Tensor) -> Tensor:
    """The values, filled up with zeros, as (tiles, TILE)."""
    missing = -len(values) % TILE
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, TILE)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _pairs(levels: Tensor) -> Tensor:
    """Whole numbers of four bits as bytes, the first in the lower half."""
    low, high = functional.pad(levels, (0, len(levels) % 2)).view(-1, 2).unbind(1)
    return (low | (high << 4)).to(torch.uint8)


class _Head(NamedTuple):
    """The parts of a payload that have a known place."""

    base: Tensor
    """(), int32."""
    lengths: Tensor
    """The words of each tile's unary run and fields, (t, 2), int64."""
    levels: Tensor
    """The scales, (b,), int32."""
    nbytes: int

    @classmethod
    def of(cls, payload: Tensor, numel: int) -> _Head:
        num_tiles, num_blocks = -(-numel // TILE), -(-numel // BLOCK)
        begin = 2 + 4 * num_tiles
        end = begin + -(-num_blocks // 2)
        _check_sizes(len(payload) >= end)
        numbers = payload[:begin].clone().view(torch.int16).to(torch.int32)
        lengths = numbers[1:].view(-1, 2).to(torch.int64) & 0xFFFF
        levels = torch.stack([payload[begin:end] & 15, payload[begin:end] >> 4], dim=1).view(-1)[:num_blocks]
        return cls(numbers[0], lengths, levels.to(torch.int32), end)


# Contexts


class _Past(NamedTuple):
    """What the last differences say of each value, (t, TILE), int32; numbers where they are not known."""

    rank: Tensor | int
    sign: Tensor | int
    prediction: Tensor | int
    """The difference to expect, counted in the direction of the last one."""


def _past(last: Tensor | None, like: Tensor) -> _Past:
    if last is None:
        return _Past(0, 1, 0)
    index = _in_tiles(last).view(-1).to(torch.int32) + 128
    return _Past(*(each.index_select(0, index).view_as(like) for each in _past_tables(last.device)))


@_kept
def _past_tables(device: torch.device) -> Tensor:
    """Rank, sign and prediction for each last difference from -128 on, (3, 256), int32."""
    last = torch.arange(-128, 128, dtype=torch.int32, device=device)
    size = last.abs()
    rank = torch.where(size > 2, bit_length(size) + 1, size).clamp_(max=RANKS - 1)
    return torch.stack([rank, torch.where(last < 0, -1, 1), (230 * size + 128) >> 8]).to(torch.int32)


def _difference(
    form: PatternForm, held: Tensor, patterns: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, _Past]:
    """The contexts and the differences of new patterns, and the scales: levels (b,) above a base ()."""
    old = _in_tiles(form.patterns(held))
    moved = form.numbers(patterns) - form.numbers(old)
    numel = form.numel(held)
    levels, base = _scales(moved, form.exponents(old))
    levels = levels[: -(-numel // BLOCK)]
    past = _past(last, old)
    return _contexts(form, old, levels, base, past, numel), moved, levels, base, past


def _scales(moved: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """The level of each block, 0 if nothing has changed, else from 1: log2 of its sum of steps, less the base."""
    sizes, exponents = moved.abs().view(-1, BLOCK), exponents.view(-1, BLOCK)
    top = exponents.amax(1)
    steps = (sizes << _STEP_BITS) >> (top.unsqueeze(1) - exponents).clamp_(max=30)
    total = steps.clamp_(max=_MAX_STEP).sum(1, dtype=torch.int32)
    scale = top - _STEP_BITS + bit_length(total)
    is_changed = sizes.amax(1) > 0
    base = torch.where(is_changed, scale, -_MAX_LEVEL).amax() - _MAX_LEVEL
    return torch.where(is_changed, (scale - base).clamp_(1, _MAX_LEVEL), 0).to(torch.int32), base


def _contexts(form: PatternForm, old: Tensor, levels: Tensor, base: Tensor, past: _Past, numel: int) -> Tensor:
    """The context of each value, (t, TILE), int32."""
    missing = old.numel() // BLOCK - len(levels)
    level = functional.pad(levels, (0, missing)).view(len(old), -1, 1)
    classes = (level + base - form.exponents(old).view(len(old), -1, BLOCK)).clamp_(0, CLASSES - 1).view_as(old)
    context = classes * RANKS + past.rank
    context.view(-1, BLOCK).masked_fill_(level.view(-1, 1) == 0, IDLE)
    context.view(-1)[numel:] = IDLE  # these are no values
    return context


# The table


def _counts(index: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs, (size,), int32."""
    ones = torch.ones(1, dtype=torch.int32, device=index.device).expand(len(index))
    return torch.zeros(size, dtype=torch.int32, device=index.device).index_add_(0, index, ones)


def _choose(form: PatternForm, context: Tensor, folded: Tensor, past: _Past) -> tuple[Tensor, Tensor]:
    """The entry of each context that takes the fewest bits, and whether it is sent: (IDLE + 1,) each."""
    entries, costs = _options(form.bits, context.device)
    histogram = _histogram(context, folded)
    bits, chosen = (histogram @ costs).min(1)
    table = entries.index_select(0, chosen)
    if not isinstance(past.prediction, int):
        rest = _histogram(context, folded - past.prediction)
        fewer, chosen = (rest @ costs[:, : 2 * RICE_CODES]).min(1)
        table = torch.where(fewer < bits, entries.index_select(0, chosen) | PREDICT, table)
    return _with_defaults(table, histogram.sum(1))


def _histogram(context: Tensor, values: Tensor) -> Tensor:
    """The values of each context by bin, (IDLE + 1, bins), fp64, in which sums of whole numbers are exact.

    Values up to 16 have bins of their own; larger ones share one with those of as many bits and the same sign.
    """
    sizes = values.abs()
    large = 2 * bit_length(sizes) + (_FIRST_LARGE_BIN - 2 * (_EXACT_BINS.bit_length())) + (values < 0)
    bins = torch.where(sizes > _EXACT_BINS, large, values + _EXACT_BINS)
    return _counts((context * _BINS + bins).view(-1), (IDLE + 1) * _BINS).view(-1, _BINS).double()


@_kept
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
        zigzag = _zigzag(-values if flip else values)
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


def _with_defaults(table: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The table with what both sides know for rare contexts, and whether each context has an entry of its own."""
    is_sent = counts >= RARE
    is_sent[IDLE] = False
    return torch.where(is_sent, table, _defaults(table.device)), is_sent


@_kept
def _defaults(device: torch.device) -> Tensor:
    """The entries of rare contexts, (IDLE + 1,), int32: a Rice code for the steps that the class says."""
    context = torch.arange(IDLE + 1, dtype=torch.int32, device=device)
    table = (context // RANKS - _ZERO_CLASS).clamp_(0, RICE_CODES - 1)
    table += PREDICT * (context % RANKS > 1)
    table[IDLE] = NONE
    return table


def _zigzag(values: Tensor) -> Tensor:
    """0, 1, -1, 2, -2, ... as 0, 1, 2, 3, 4, ..."""
    return 2 * values.abs() - (values > 0).to(values.dtype)


# Codes


class _Buckets(NamedTuple):
    """The values in buckets, by tile, size of bucket and place: (s,), int64 each."""

    value: Tensor
    """Their places among all values."""
    group: Tensor
    """Their tile x _COLUMNS + log2 of the size of bucket."""
    rank: Tensor
    """Their place in their group."""
    cell: Tensor
    """The place of their bucket among all unary numbers."""


class _Cells(NamedTuple):
    """Where the unary numbers of a payload stand, tile by tile: those of Rice codes, then those of buckets."""

    num: int
    """The number of all of them."""
    per_tile: Tensor
    """(t,), int64."""
    is_rice: Tensor
    """(t, TILE), bool."""
    of_rice: Tensor
    """The place of a value's number among all, (t, TILE), int64, if it has a Rice code."""
    counts: Tensor
    """The values of each group, (t, _COLUMNS), int64."""
    group_begin: Tensor
    """The place of the first number of each group, (t * _COLUMNS,), int64."""
    group_first: Tensor
    """The first value of each group among those in buckets, (t * _COLUMNS,), int64."""
    buckets: _Buckets


def _cells(codes: Tensor) -> _Cells:
    """Lay out the unary numbers of values with these codes, (t, TILE), which both sides know."""
    device, num_tiles = codes.device, len(codes)
    columns = _columns(device)
    column = columns.index_select(0, codes.view(-1)).view_as(codes)
    groups = column + _COLUMNS * torch.arange(num_tiles, dtype=torch.int32, device=device).unsqueeze(1)
    counts = _counts(groups.view(-1), num_tiles * _COLUMNS).to(torch.int64).view(-1, _COLUMNS)
    size_bits = torch.arange(_COLUMNS, device=device)
    is_bucket = (size_bits > 0) & (size_bits < _COLUMNS - 1)
    sizes = ((counts + (1 << size_bits) - 1) >> size_bits) * (size_bits < _COLUMNS - 1)
    group_begin = _before(sizes.view(-1))
    group_first = _before((counts * is_bucket).view(-1))
    is_rice = column == 0
    of_rice = is_rice.cumsum(1) + (group_begin.view(-1, _COLUMNS)[:, :1] - 1)

    value = ((column > 0) & (column < _COLUMNS - 1)).view(-1).nonzero().view(-1)
    group, order = groups.view(-1).index_select(0, value).sort(stable=True)
    rank = torch.arange(len(group), device=device) - group_first.index_select(0, group)
    cell = group_begin.index_select(0, group) + (rank >> (group & (_COLUMNS - 1)))
    buckets = _Buckets(value.index_select(0, order), group.to(torch.int64), rank, cell)
    return _Cells(int(sizes.sum()), sizes.sum(1), is_rice, of_rice, counts, group_begin, group_first, buckets)


@_kept
def _columns(device: torch.device) -> Tensor:
    """The column of each code, (32,), int32."""
    codes = torch.arange(CODE + 1, dtype=torch.int32, device=device)
    column = torch.where(codes > BUCKETS, codes - BUCKETS, _COLUMNS - 1)
    return torch.where(codes < RICE_CODES, 0, column).to(torch.int32)


def _before(sizes: Tensor) -> Tensor:
    """The sum of all sizes before each, int64."""
    return sizes.cumsum(0) - sizes


def _words(bits: Tensor) -> Tensor:
    return (bits + (WORD_BITS - 1)) // WORD_BITS


class _Run(NamedTuple):
    """Fields that follow each other in each tile."""

    tile: Tensor
    """The tile of each field, (f,), int64, ascending."""
    widths: Tensor
    """(f,), int64."""
    bits: Tensor
    """The bits of all in each tile, (t,), int64."""

    @classmethod
    def of(cls, tile: Tensor, widths: Tensor, num_tiles: int) -> _Run:
        zeros = torch.zeros(num_tiles, dtype=torch.int64, device=tile.device)
        return cls(tile, widths, zeros.index_add_(0, tile, widths))

    def offsets(self, begins: Tensor) -> Tensor:
        """Where each field begins, (f,), if those of a tile begin at `begins`, (t,)."""
        return _before(self.widths) + (begins - _before(self.bits)).index_select(0, self.tile)


def _widths(form: PatternForm, codes: Tensor, is_rice: Tensor, quotients: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the pattern of a value follows in its field, and the width of the field: (t, TILE)."""
    is_raw = (codes == RAW) | (is_rice & (quotients == MAX_QUOTIENT))
    return is_raw, torch.where(is_raw, form.bits, codes * is_rice)


def _write(
    form: PatternForm, entries: Tensor, patterns: Tensor, moved: Tensor, past: _Past
) -> tuple[Tensor, Tensor, Tensor]:
    """Write both runs of all tiles, (w,), int64 words, and their words in each tile, (t, 2)."""
    codes, num_tiles = entries & CODE, len(entries)
    cells = _cells(codes)
    buckets = cells.buckets
    zigzag = _zigzag((moved * past.sign - past.prediction * _flag(entries, PREDICT)) * (1 - 2 * _flag(entries, FLIP)))
    quotients = (zigzag >> codes).clamp_(max=MAX_QUOTIENT)
    is_raw, widths = _widths(form, codes, cells.is_rice, quotients)
    changes = moved.view(-1).index_select(0, buckets.value)
    events = changes.abs().clamp_(max=MAX_EVENTS)
    unary, unary_words = _write_unary(cells, quotients, events)

    running = widths.cumsum(1)
    changed = events.nonzero().view(-1)
    event = torch.repeat_interleave(changed, events.index_select(0, changed))
    group = buckets.group.index_select(0, event)
    bucket_bits = group & (_COLUMNS - 1)
    escaped = (events == MAX_EVENTS).nonzero().view(-1)
    of_events = _Run.of(group >> 4, bucket_bits + 1, num_tiles)
    of_escapes = _run_of_escapes(form, buckets, escaped, num_tiles)
    num_words = _words(running[:, -1] + of_events.bits + of_escapes.bits)
    begins = WORD_BITS * _before(num_words)

    words = torch.zeros(int(num_words.sum()) + 2, dtype=torch.int64, device=codes.device)
    low_bits = torch.where(is_raw, patterns, zigzag & ((1 << widths) - 1))
    write_fields(words, low_bits.view(-1), (running - widths + begins.unsqueeze(1)).view(-1))
    place = buckets.rank.index_select(0, event) & ((1 << bucket_bits) - 1)
    is_down = changes.index_select(0, event) < 0
    begins = begins + running[:, -1]
    write_fields(words, (place << 1) | is_down, of_events.offsets(begins))
    follow = patterns.view(-1).index_select(0, buckets.value.index_select(0, escaped))
    write_fields(words, follow, of_escapes.offsets(begins + of_events.bits))
    return unary, words[:-2], torch.stack([unary_words, num_words], dim=1)


def _flag(entries: Tensor, flag: int) -> Tensor:
    return (entries & flag) // flag


def _run_of_escapes(form: PatternForm, buckets: _Buckets, escaped: Tensor, num_tiles: int) -> _Run:
    tile = buckets.group.index_select(0, escaped) >> 4
    return _Run.of(tile, torch.full_like(tile, form.bits), num_tiles)


def _write_unary(cells: _Cells, quotients: Tensor, events: Tensor) -> tuple[Tensor, Tensor]:
    """Write the unary numbers, each as zeros and a one: words (w,), int64, and the words of each tile."""
    numbers = torch.zeros(cells.num + 1, dtype=torch.int32, device=quotients.device)
    numbers.scatter_(0, torch.where(cells.is_rice, cells.of_rice, cells.num).view(-1), quotients.view(-1))
    numbers = numbers[:-1].index_add_(0, cells.buckets.cell, events)
    ends = functional.pad((numbers + 1).cumsum(0), (1, 0))
    tile_ends = ends.index_select(0, cells.per_tile.cumsum(0))
    tile_begins = functional.pad(tile_ends[:-1], (1, 0))
    num_words = _words(tile_ends - tile_begins)
    shifts = WORD_BITS * _before(num_words) - tile_begins
    words = torch.zeros(int(num_words.sum()), dtype=torch.int64, device=quotients.device)
    write_ones(words, ends[1:] - 1 + torch.repeat_interleave(shifts, cells.per_tile, output_size=cells.num))
    return words, num_words


def _read_unary(cells: _Cells, unary: Tensor, num_words: Tensor) -> Tensor:
    """The unary numbers that `_write_unary` has written, (cells,), int64."""
    ends = positions_of_ones(unary)
    _check_sizes(len(ends) == cells.num)
    begins = WORD_BITS * _before(num_words)
    begins = torch.repeat_interleave(begins, cells.per_tile, output_size=cells.num)
    before = functional.pad(ends[:-1], (1, 0), value=-1) + 1
    return ends - torch.maximum(before, begins)


def _read(
    form: PatternForm, entries: Tensor, old: Tensor, unary: Tensor, words: Tensor, lengths: Tensor, past: _Past
) -> Tensor:
    """The new patterns, (t, TILE), int32, from both runs, int32 words."""
    codes, num_tiles = entries & CODE, len(entries)
    cells = _cells(codes)
    buckets = cells.buckets
    numbers = _read_unary(cells, unary, lengths[:, 0])
    padded = functional.pad(numbers, (0, 1)).to(torch.int32)
    at = torch.where(cells.is_rice, cells.of_rice, cells.num).view(-1)
    quotients = padded.index_select(0, at).view_as(codes)
    is_raw, widths = _widths(form, codes, cells.is_rice, quotients)
    running = widths.cumsum(1)
    begins = WORD_BITS * _before(lengths[:, 1])
    words = functional.pad(words, (0, 2))
    _check_sizes((running[:, -1] <= WORD_BITS * lengths[:, 1]).all())
    low_bits = read_fields(words, widths.view(-1), (running - widths + begins.unsqueeze(1)).view(-1))
    low_bits = low_bits.to(torch.int32).view_as(codes)
    zigzag = (quotients << codes) | low_bits
    value = ((zigzag + 1) >> 1) * (2 * (zigzag & 1) - 1) * (1 - 2 * _flag(entries, FLIP))
    moved = (value + past.prediction * _flag(entries, PREDICT)) * past.sign * cells.is_rice

    of_bucket = torch.ones(cells.num + 1, dtype=torch.bool, device=codes.device)
    of_bucket[at] = False
    cell = of_bucket[:-1].nonzero().view(-1)
    cell = torch.repeat_interleave(cell, numbers.index_select(0, cell))
    group = torch.searchsorted(cells.group_begin, cell, right=True) - 1
    bucket_bits = group & (_COLUMNS - 1)
    of_events = _Run.of(group >> 4, bucket_bits + 1, num_tiles)
    num_bits = running[:, -1] + of_events.bits
    _check_sizes((num_bits <= WORD_BITS * lengths[:, 1]).all())
    events = read_fields(words, of_events.widths, of_events.offsets(begins + running[:, -1]))
    bucket = cell - cells.group_begin.index_select(0, group)
    place = (bucket << bucket_bits) + (events >> 1)
    _check_sizes((place < cells.counts.view(-1).index_select(0, group)).all())
    changes = torch.zeros(len(buckets.value), dtype=torch.int32, device=codes.device)
    signs = (1 - 2 * (events & 1)).to(torch.int32)
    changes.index_add_(0, cells.group_first.index_select(0, group) + place, signs)
    moved.view(-1).index_copy_(0, buckets.value, changes)

    escaped = (changes.abs() >= MAX_EVENTS).nonzero().view(-1)
    of_escapes = _run_of_escapes(form, buckets, escaped, num_tiles)
    _check_sizes(torch.equal(_words(num_bits + of_escapes.bits), lengths[:, 1]))
    follow = read_fields(words, of_escapes.widths, of_escapes.offsets(begins + num_bits)).to(torch.int32)
    patterns = torch.where(is_raw, low_bits, form.patterns_of(form.numbers(old) + moved))
    patterns.view(-1).index_copy_(0, buckets.value.index_select(0, escaped), follow)
    return patterns


class PartBytes(NamedTuple):
    """The bytes of a payload by part."""

    head: int
    """The base, the words of each tile, and what fills up."""
    scales: int
    table: int
    unary: int
    fields: int


def part_bytes(payload: Tensor, numel: int) -> PartBytes:
    """The bytes of the parts of a payload of `numel` patterns, which is not the new values themselves."""
    head = _Head.of(payload, numel)
    unary, fields = (4 * head.lengths.sum(0)).tolist()
    scales, table = -(-len(head.levels) // 2), len(payload) - unary - fields - head.nbytes
    return PartBytes(head.nbytes - scales, scales, table, unary, fields)


def differences_by_context(
    held: Tensor, new: Tensor, last: Tensor | None = None, *, form: PatternForm | None = None
) -> tuple[Tensor, Tensor]:
    """The context of each value, and its difference in the direction of the last one: (n,), int32 each.

    Their conditional entropy is the least that a code with these contexts takes.
    """
    form = _checked(held, last, form, new)
    context, moved, _, _, past = _difference(form, held, _in_tiles(form.patterns(new)), last)
    numel = form.numel(held)
    return context.view(-1)[:numel], (moved * past.sign).view(-1)[:numel]
