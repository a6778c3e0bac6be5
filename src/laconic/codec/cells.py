"""The two runs of bits of every tile, unary numbers and fields, in plain torch.

[Note: Codes that decode in parallel] in codec/lossless.py says what they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.blocked import kept
from laconic.codec.contexts import (
    BUCKETS,
    CODE,
    MAX_EVENTS,
    MAX_QUOTIENT,
    RAW,
    RICE_CODES,
    Past,
    occurrences,
)
from laconic.codec.patterns import (
    WORD_BITS,
    PatternForm,
    positions_of_ones,
    read_fields,
    write_fields,
    write_ones,
    zigzag_of,
)

_COLUMNS = 16  # of a tile: values with Rice codes, those in buckets of 2**1, 2**2, ..., and at the last all others


def check_sizes(agree: bool | Tensor) -> None:
    """Raise a ValueError unless the sizes that a payload states and those that follow from held values agree."""
    if not agree:
        raise ValueError(
            "a payload of lossless differences does not fit the held values: it is damaged, or `held` or `last` differ "
            "from those that encode got; send the values themselves"
        )


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
    """The place of each value's number among all, (t * TILE,), int32; `num`, after all of them, without a Rice code."""
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
    counts = occurrences(groups.view(-1), num_tiles * _COLUMNS).to(torch.int64).view(-1, _COLUMNS)
    size_bits = torch.arange(_COLUMNS, device=device)
    is_bucket = (size_bits > 0) & (size_bits < _COLUMNS - 1)
    sizes = ((counts + (1 << size_bits) - 1) >> size_bits) * (size_bits < _COLUMNS - 1)
    group_begin = _before(sizes.view(-1))
    group_first = _before((counts * is_bucket).view(-1))
    is_rice, num = column == 0, int(sizes.sum())
    of_rice = is_rice.cumsum(1, dtype=torch.int32) + (group_begin.view(-1, _COLUMNS)[:, :1] - 1).to(torch.int32)
    of_rice = torch.where(is_rice, of_rice, num).view(-1)

    value = ((column > 0) & (column < _COLUMNS - 1)).view(-1).nonzero().view(-1)
    group, order = groups.view(-1).index_select(0, value).sort(stable=True)
    rank = torch.arange(len(group), device=device) - group_first.index_select(0, group)
    cell = group_begin.index_select(0, group) + (rank >> (group & (_COLUMNS - 1)))
    buckets = _Buckets(value.index_select(0, order), group.to(torch.int64), rank, cell)
    return _Cells(num, sizes.sum(1), is_rice, of_rice, counts, group_begin, group_first, buckets)


@kept
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
        """Where each field begins, (f,), int32, if those of a tile begin at `begins`, (t,)."""
        offsets = _before(self.widths) + (begins - _before(self.bits)).index_select(0, self.tile)
        return offsets.to(torch.int32)


def _offsets(running: Tensor, widths: Tensor, begins: Tensor) -> Tensor:
    """Where the field of each value begins, (t * TILE,), int32, from the sums of widths up to each, (t, TILE)."""
    return (running - widths + begins.to(torch.int32).unsqueeze(1)).view(-1)


def _widths(form: PatternForm, codes: Tensor, is_rice: Tensor, quotients: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the pattern of a value follows in its field, and the width of the field: (t, TILE)."""
    is_raw = (codes == RAW) | (is_rice & (quotients == MAX_QUOTIENT))
    return is_raw, torch.where(is_raw, form.bits, codes * is_rice)


def write_runs(
    form: PatternForm, entries: Tensor, patterns: Tensor, folded: Tensor, past: Past
) -> tuple[Tensor, Tensor, Tensor]:
    """Write both runs of all tiles.

    Args:
        form: how to read patterns.
        entries: each value's entry of the table, (t, TILE), int32.
        patterns: the new patterns, of the same shape, int32.
        folded: the differences of their numbers in the direction of the last ones, of the same shape, int32.
        past: what the last differences say.

    Returns:
        The unary runs and the fields, (w,) each, int32, and the words of both in each tile, (t, 2), int64.
    """
    codes, num_tiles = entries & CODE, len(entries)
    cells = _cells(codes)
    buckets = cells.buckets
    value = folded - past.prediction * ((entries >> 6) & 1)
    zigzag = zigzag_of(value * (1 - 2 * ((entries >> 5) & 1)))
    quotients = (zigzag >> codes).clamp_(max=MAX_QUOTIENT)
    is_raw, widths = _widths(form, codes, cells.is_rice, quotients)
    changes = (folded * past.sign).view(-1).index_select(0, buckets.value)
    events = changes.abs().clamp_(max=MAX_EVENTS)
    unary, unary_words = _write_unary(cells, quotients, events)

    running = widths.cumsum(1, dtype=torch.int32)
    changed = events.nonzero().view(-1)
    event = torch.repeat_interleave(changed, events.index_select(0, changed))
    group = buckets.group.index_select(0, event)
    bucket_bits = group & (_COLUMNS - 1)
    escaped = (events == MAX_EVENTS).nonzero().view(-1)
    of_events = _Run.of(group >> 4, bucket_bits + 1, num_tiles)
    of_escapes = _run_of_escapes(form, buckets, escaped, num_tiles)
    num_words = _words(running[:, -1] + of_events.bits + of_escapes.bits)
    begins = WORD_BITS * _before(num_words)

    words = torch.zeros(int(num_words.sum()) + 2, dtype=torch.int32, device=codes.device)
    low_bits = torch.where(is_raw, patterns, zigzag & ((1 << widths) - 1))
    write_fields(words, low_bits.view(-1), _offsets(running, widths, begins))
    place = (buckets.rank.index_select(0, event) & ((1 << bucket_bits) - 1)).to(torch.int32)
    is_down = changes.index_select(0, event) < 0
    begins = begins + running[:, -1]
    write_fields(words, (place << 1) | is_down, of_events.offsets(begins))
    follow = patterns.view(-1).index_select(0, buckets.value.index_select(0, escaped))
    write_fields(words, follow, of_escapes.offsets(begins + of_events.bits))
    return unary, words[:-2], torch.stack([unary_words, num_words], dim=1)


def _run_of_escapes(form: PatternForm, buckets: _Buckets, escaped: Tensor, num_tiles: int) -> _Run:
    tile = buckets.group.index_select(0, escaped) >> 4
    return _Run.of(tile, torch.full_like(tile, form.bits), num_tiles)


def _write_unary(cells: _Cells, quotients: Tensor, events: Tensor) -> tuple[Tensor, Tensor]:
    """Write the unary numbers, each as zeros and a one: words (w,), int32, and the words of each tile, int64."""
    numbers = torch.zeros(cells.num + 1, dtype=torch.int32, device=quotients.device)
    numbers.index_add_(0, cells.of_rice, quotients.view(-1))
    numbers = numbers[:-1].index_add_(0, cells.buckets.cell, events)
    ends = functional.pad((numbers + 1).cumsum(0, dtype=torch.int32), (1, 0))
    tile_ends = ends.index_select(0, cells.per_tile.cumsum(0))
    tile_begins = functional.pad(tile_ends[:-1], (1, 0))
    num_words = _words(tile_ends - tile_begins)
    shifts = (WORD_BITS * _before(num_words) - tile_begins - 1).to(torch.int32)
    words = torch.zeros(int(num_words.sum()), dtype=torch.int32, device=quotients.device)
    write_ones(words, ends[1:] + torch.repeat_interleave(shifts, cells.per_tile, output_size=cells.num))
    return words, num_words


def _read_unary(cells: _Cells, unary: Tensor, num_words: Tensor) -> Tensor:
    """The unary numbers that `_write_unary` has written, and a zero, (cells + 1,), int32."""
    ends = positions_of_ones(unary)
    check_sizes(len(ends) == cells.num)
    begins = (WORD_BITS * _before(num_words)).to(torch.int32)
    begins = torch.repeat_interleave(begins, cells.per_tile, output_size=cells.num)
    before = functional.pad(ends[:-1], (1, 0), value=-1) + 1
    numbers = ends - torch.maximum(before, begins)
    check_sizes((numbers >= 0).all())
    return functional.pad(numbers, (0, 1))


def read_runs(
    form: PatternForm, entries: Tensor, old: Tensor, unary: Tensor, words: Tensor, lengths: Tensor, past: Past
) -> Tensor:
    """Read the new patterns, (t, TILE), int32.

    Args:
        form: how to read patterns.
        entries: each value's entry of the table, (t, TILE), int32.
        old: the held patterns, of the same shape, int32.
        unary: the unary runs of all tiles, (w,), int32.
        words: the fields of all tiles, (w,), int32.
        lengths: the words of both in each tile, (t, 2), int64.
        past: what the last differences say.

    Raises:
        ValueError: sizes do not fit.
    """
    codes, num_tiles = entries & CODE, len(entries)
    cells = _cells(codes)
    buckets = cells.buckets
    numbers = _read_unary(cells, unary, lengths[:, 0])
    quotients = numbers.index_select(0, cells.of_rice).view_as(codes)
    is_raw, widths = _widths(form, codes, cells.is_rice, quotients)
    running = widths.cumsum(1, dtype=torch.int32)
    begins = WORD_BITS * _before(lengths[:, 1])
    words = functional.pad(words, (0, 2))
    check_sizes((running[:, -1] <= WORD_BITS * lengths[:, 1]).all())
    low_bits = read_fields(words, widths.view(-1), _offsets(running, widths, begins)).view_as(codes)
    zigzag = (quotients << codes) | low_bits
    value = ((zigzag + 1) >> 1) * (2 * (zigzag & 1) - 1) * (1 - 2 * ((entries >> 5) & 1))
    moved = (value + past.prediction * ((entries >> 6) & 1)) * past.sign * cells.is_rice

    of_bucket = torch.ones(cells.num + 1, dtype=torch.bool, device=codes.device)
    of_bucket.index_fill_(0, cells.of_rice.to(torch.int64), False)
    cell = of_bucket[:-1].nonzero().view(-1)
    cell = torch.repeat_interleave(cell, numbers.index_select(0, cell))
    group = torch.searchsorted(cells.group_begin, cell, right=True) - 1
    bucket_bits = group & (_COLUMNS - 1)
    of_events = _Run.of(group >> 4, bucket_bits + 1, num_tiles)
    num_bits = running[:, -1] + of_events.bits
    check_sizes((num_bits <= WORD_BITS * lengths[:, 1]).all())
    events = read_fields(words, of_events.widths.to(torch.int32), of_events.offsets(begins + running[:, -1]))
    bucket = cell - cells.group_begin.index_select(0, group)
    place = (bucket << bucket_bits) + (events >> 1)
    check_sizes((place < cells.counts.view(-1).index_select(0, group)).all())
    changes = torch.zeros(len(buckets.value), dtype=torch.int32, device=codes.device)
    changes.index_add_(0, cells.group_first.index_select(0, group) + place, 1 - 2 * (events & 1))
    moved.view(-1).index_copy_(0, buckets.value, changes)

    escaped = (changes.abs() >= MAX_EVENTS).nonzero().view(-1)
    of_escapes = _run_of_escapes(form, buckets, escaped, num_tiles)
    check_sizes(torch.equal(_words(num_bits + of_escapes.bits), lengths[:, 1]))
    follow = read_fields(words, of_escapes.widths.to(torch.int32), of_escapes.offsets(begins + num_bits))
    patterns = torch.where(is_raw, low_bits, form.patterns_of(form.numbers(old) + moved))
    patterns.view(-1).index_copy_(0, buckets.value.index_select(0, escaped), follow)
    return patterns
