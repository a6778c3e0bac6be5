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
    BUCKET_BITS,
    BUCKETS,
    CODE,
    MAX_EVENTS,
    MAX_QUOTIENT,
    NONE,
    RAW,
    RICE_CODES,
    TILE,
    Past,
)
from laconic.codec.patterns import WORD_BITS, FieldWriter, PatternForm, read_fields

_RICE, _SHIFT, _WIDTH = 7, 8, 13  # the lowest bits of parts of an `instruction`
_NO_QUOTIENT = 31  # the shift that leaves nothing of a zigzag number
_COUNT_BITS, _LANE = 16, 4  # of a running count of one size of bucket; an int64 has so many of them side by side
_COUNT = (1 << _COUNT_BITS) - 1


def check_sizes(agree: bool | Tensor) -> None:
    """Raise a ValueError unless the sizes that a payload states and those that follow from held values agree."""
    if not agree:
        raise ValueError(
            "a payload of lossless differences does not fit the held values: it is damaged, or `held` or `last` differ "
            "from those that encode got; send the values themselves"
        )


def words_of(bits: Tensor) -> Tensor:
    """The words that hold so many bits."""
    return (bits + (WORD_BITS - 1)) // WORD_BITS


class Instructions(NamedTuple):
    """How to code each value, (t, TILE), int32 each."""

    entry: Tensor
    """The entry of the table and, above it, the other three."""
    is_rice: Tensor
    shift: Tensor
    """The low bits of a Rice code."""
    width: Tensor
    """The bits of its field, unless its pattern follows."""

    @classmethod
    def of(
        cls, form: PatternForm, table: Tensor, context: Tensor, raw_tiles: Tensor | None, numel: int
    ) -> Instructions:
        """Look up the entries of contexts, and RAW for all values of some tiles, (t,), bool.

        Shapes: table (IDLE,), contexts (t, TILE), int32.
        """
        by_entry = _instructions(form.bits, table.device)
        entries = functional.pad(table, (0, 1), value=NONE)
        packed = by_entry.index_select(0, entries).index_select(0, context.view(-1)).view_as(context)
        if raw_tiles is not None:
            packed[raw_tiles] = by_entry[RAW]
            packed.view(-1)[numel:] = by_entry[NONE]
        return cls(packed, (packed >> _RICE) & 1, (packed >> _SHIFT) & 31, packed >> _WIDTH)

    @property
    def turn(self) -> Tensor:
        """1 for values whose zigzag numbers begin with minus, else -1."""
        return ((self.entry >> 4) & 2) - 1

    @property
    def predicts(self) -> Tensor:
        """Whether the prediction is taken off, 0 or 1."""
        return (self.entry >> 6) & 1


@kept
def _instructions(pattern_bits: int, device: torch.device) -> Tensor:
    """What follows from each entry of a table, beside it in one number, (128,), int32."""
    entry = torch.arange(128, dtype=torch.int32, device=device)
    code = entry & CODE
    is_rice = (code < RICE_CODES).to(torch.int32)
    shift = torch.where(code < RICE_CODES, code, _NO_QUOTIENT)
    width = torch.where(code < RICE_CODES, code, pattern_bits * (code == RAW))
    return (entry | (is_rice << _RICE) | (shift << _SHIFT) | (width << _WIDTH)).to(torch.int32)


class _Buckets(NamedTuple):
    """The values in buckets of one size, 2**m."""

    m: int
    counts: Tensor
    """Those of each tile, (t,), int64."""
    running: Tensor
    """A running count of them in each tile, (t, TILE), int64, and others beside it."""
    shift: int
    """Where the count begins in `running`."""

    @property
    def cells(self) -> Tensor:
        """The buckets, and so unary numbers, of each tile, (t,), int64."""
        return (self.counts + ((1 << self.m) - 1)) >> self.m

    def ranks_of(self, values: Tensor) -> Tensor:
        """The places of values, (v,), among those of their tile, int64."""
        return ((self.running.view(-1).index_select(0, values) >> self.shift) & _COUNT) - 1

    def values_at(self, tiles: Tensor, ranks: Tensor) -> Tensor:
        """The reverse of `ranks_of`."""
        begins = torch.arange(len(self.counts), device=tiles.device) << _COUNT_BITS
        ascending = ((self.running >> self.shift) & _COUNT) + begins.unsqueeze(1)
        return torch.searchsorted(ascending.view(-1), (tiles << _COUNT_BITS) + ranks + 1)


def _buckets(own: Instructions) -> list[_Buckets]:
    """Count the values in buckets of each size that occurs."""
    found, codes = [], own.entry & CODE
    largest = int(codes.amax())
    for lane in range(-(-len(BUCKET_BITS) // _LANE)):
        sizes = BUCKET_BITS[_LANE * lane : _LANE * (lane + 1)]
        if largest < BUCKETS + sizes[0]:
            break
        running = _lanes(codes.device)[lane].index_select(0, codes.view(-1)).view_as(codes).cumsum(1)
        for place, m in enumerate(sizes):
            counts = (running[:, -1] >> (_COUNT_BITS * place)) & _COUNT
            if counts.any():
                found.append(_Buckets(m, counts, running, _COUNT_BITS * place))
    return found


@kept
def _lanes(device: torch.device) -> Tensor:
    """What each code adds to the running counts of four sizes of bucket, (2, 32), int64."""
    lanes = torch.zeros(2, CODE + 1, dtype=torch.int64)
    for place, m in enumerate(BUCKET_BITS):
        lanes[place // _LANE, BUCKETS + m] = 1 << (_COUNT_BITS * (place % _LANE))
    return lanes.to(device)


def _before(sizes: Tensor) -> Tensor:
    """The sum of all sizes before each, int64."""
    return sizes.cumsum(0) - sizes


def _per_tile(tiles: Tensor, numbers: Tensor, num_tiles: int) -> Tensor:
    return torch.zeros(num_tiles, dtype=torch.int64, device=tiles.device).index_add_(0, tiles, numbers)


class _Events(NamedTuple):
    """The changed values in buckets of one size."""

    of: _Buckets
    numbers: Tensor
    """The events of each bucket, (c,), int64."""
    tile: Tensor
    """The tile of each event, (e,), int64, ascending."""
    field: Tensor
    """Of each event the place and the sign, (e,), int32."""
    per_tile: Tensor
    """The events of each tile, (t,), int64."""

    @classmethod
    def written(cls, of: _Buckets, values: Tensor, changes: Tensor) -> _Events:
        """The events of values, which are those in buckets of this size that have changed, (v,)."""
        tiles, ranks = values // TILE, of.ranks_of(values)
        events = changes.abs().clamp_(max=MAX_EVENTS).to(torch.int64)
        cells = of.cells
        cell = _before(cells).index_select(0, tiles) + (ranks >> of.m)
        numbers = _per_tile(cell, events, int(cells.sum()))
        field = (((ranks & ((1 << of.m) - 1)) << 1) | (changes < 0)).to(torch.int32)
        per_tile = _per_tile(tiles, events, len(cells))
        return cls(of, numbers, tiles.repeat_interleave(events), field.repeat_interleave(events), per_tile)

    @property
    def unary_bits(self) -> Tensor:
        """The bits of unary numbers in each tile, (t,), int64."""
        return self.of.cells + self.per_tile

    @property
    def field_bits(self) -> Tensor:
        """The bits of fields in each tile, (t,), int64."""
        return self.per_tile * (self.of.m + 1)

    def ends(self, begins: Tensor) -> Tensor:
        """The places of the ones of all unary numbers, if those of a tile begin at `begins`, (t,)."""
        shifts = begins - _before(self.unary_bits) - 1
        return (self.numbers + 1).cumsum(0) + shifts.repeat_interleave(self.of.cells)

    def offsets(self, begins: Tensor) -> Tensor:
        """Where the field of each event begins, (e,), int32, if those of a tile begin at `begins`, (t,)."""
        return _offsets_of_events(self.tile, self.per_tile, self.of.m, begins)


def _offsets_of_events(tile: Tensor, per_tile: Tensor, m: int, begins: Tensor) -> Tensor:
    width = m + 1
    index = torch.arange(len(tile), device=tile.device)
    return (index * width + (begins - _before(per_tile) * width).index_select(0, tile)).to(torch.int32)


class RunSizes(NamedTuple):
    """The bits of the unary run of each tile, and the words of both runs, (t,), int64 each."""

    unary_bits: Tensor
    words: Tensor

    @property
    def begins(self) -> Tensor:
        """Where the run of each tile begins, in bits."""
        return WORD_BITS * _before(self.words)

    @property
    def is_raw(self) -> Tensor:
        """The tiles that have their patterns instead: no unary number is there, but something is."""
        return (self.unary_bits == 0) & (self.words > 0)


def write_runs(
    form: PatternForm, table: Tensor, context: Tensor, patterns: Tensor, folded: Tensor, past: Past, numel: int
) -> tuple[Tensor, RunSizes]:
    """Write both runs of all tiles, as words, (w,), int32; of those that would be as long as their patterns, these.

    Args:
        form: how to read patterns.
        table: the entry of each context, (IDLE,), int32.
        context: that of each value, (t, TILE), int32.
        patterns: the new patterns, of the same shape, of any whole numbers.
        folded: the differences of their numbers in the direction of the last ones, of the same shape, int32.
        past: what the last differences say.
        numel: the values that do not only fill up a tile.
    """
    run = _Written.of(form, Instructions.of(form, table, context, None, numel), folded, past)
    is_long = run.sizes.words >= raw_words(form, numel, len(context), context.device)
    is_long &= run.sizes.unary_bits > 0
    if is_long.any():
        run = _Written.of(form, Instructions.of(form, table, context, is_long, numel), folded, past)
    return run.words(form, patterns), run.sizes


def raw_words(form: PatternForm, numel: int, num_tiles: int, device: torch.device) -> Tensor:
    """The words that the patterns of each tile take, (t,), int64."""
    values = numel - TILE * torch.arange(num_tiles, device=device)
    return words_of(values.clamp_(max=TILE) * form.bits)


class _Written(NamedTuple):
    """All that is known of two runs before they are written."""

    own: Instructions
    zigzag: Tensor
    """(t, TILE), int32."""
    escaped: Tensor
    """The values whose patterns follow, not those of raw tiles, (x,), int64."""
    unary_ends: Tensor
    """Where the unary number of each Rice code ends in its tile, (t, TILE), int32; others end with the last one."""
    field_ends: Tensor
    """Where the field of each value ends in its tile, without events, (t, TILE), int32."""
    has_fields: bool
    """Whether others than the escaped have fields."""
    events: list[_Events]

    @classmethod
    def of(cls, form: PatternForm, own: Instructions, folded: Tensor, past: Past) -> _Written:
        value = folded if isinstance(past.prediction, int) else folded - past.prediction * own.predicts
        turned = value * own.turn
        zigzag = (turned << 1) ^ (turned >> 31)
        quotients = (zigzag >> own.shift).clamp_(max=MAX_QUOTIENT)
        unary_ends = (quotients + own.is_rice).cumsum(1, dtype=torch.int32)
        escaped = [(quotients >> 4).view(-1).nonzero().view(-1)]  # only the largest one has this bit
        events = []
        if buckets := _buckets(own):
            is_changed = folded * ((own.entry >> 4) & 1)  # codes of buckets have this bit
            changed = is_changed.view(-1).nonzero().view(-1)
            changes = folded.view(-1).index_select(0, changed)
            codes = own.entry.view(-1).index_select(0, changed) & CODE
            escaped.append(changed[changes.abs() >= MAX_EVENTS])
            for each in buckets:
                is_own = codes == BUCKETS + each.m
                events.append(_Events.written(each, changed[is_own], changes[is_own]))
        raw = torch.cat(escaped)
        has_fields = bool(own.width.amax() > 0)
        own.width.view(-1).index_fill_(0, raw, form.bits)
        return cls(own, zigzag, raw, unary_ends, own.width.cumsum(1, dtype=torch.int32), has_fields, events)

    @property
    def sizes(self) -> RunSizes:
        """The sizes of both runs."""
        unary, fields = self.unary_ends[:, -1].to(torch.int64), self.field_ends[:, -1].to(torch.int64)
        for each in self.events:
            unary, fields = unary + each.unary_bits, fields + each.field_bits
        return RunSizes(unary, words_of(unary + fields))

    def words(self, form: PatternForm, patterns: Tensor) -> Tensor:
        """Write both runs."""
        sizes = self.sizes
        begins = sizes.begins
        writer = FieldWriter(int(sizes.words.sum()), begins.device)
        # a value without a Rice code writes nothing, where the last unary number ends, or before all of them
        ends = (self.unary_ends + (begins - 1).to(torch.int32).unsqueeze(1)).view(-1).clamp_(min=0)
        writer.write(self.own.is_rice.view(-1), ends)
        begins = begins + self.unary_ends[:, -1]
        for each in self.events:
            ends = each.ends(begins).to(torch.int32)
            writer.write(torch.ones_like(ends), ends)
            begins = begins + each.unary_bits
        for each in self.events:
            writer.write(each.field, each.offsets(begins))
            begins = begins + each.field_bits
        offsets = (self.field_ends - self.own.width + begins.to(torch.int32).unsqueeze(1)).view(-1)
        follow = patterns.view(-1).index_select(0, self.escaped).to(torch.int32) & ((1 << form.bits) - 1)
        if not self.has_fields:
            writer.write(follow, offsets.index_select(0, self.escaped))
            return writer.words()
        values = self.zigzag & ((1 << self.own.width) - 1)
        values.view(-1).index_copy_(0, self.escaped, follow)
        if (is_raw := sizes.is_raw).any():
            values[is_raw] = patterns[is_raw].to(torch.int32) & ((1 << self.own.width[is_raw]) - 1)
        writer.write(values.view(-1), offsets)
        return writer.words()


def _read_unary(words: Tensor, sizes: RunSizes, cells: Tensor) -> Tensor:
    """The unary numbers of each tile, and at the end of each tile one more, of the bits that fill up: int32.

    Shapes: words (w,), and the numbers of each tile (t,).
    """
    own_words = words_of(sizes.unary_bits)
    check_sizes((own_words <= sizes.words).all())
    tile = torch.arange(len(cells), dtype=torch.int32, device=words.device).repeat_interleave(own_words)
    index = torch.arange(len(tile), device=words.device)
    shifts = _before(sizes.words) - _before(own_words)
    unary = words.index_select(0, index + shifts.index_select(0, tile))
    ends = own_words.cumsum(0)
    mixed = (sizes.unary_bits & (WORD_BITS - 1)).nonzero().view(-1)  # the tiles whose fields begin within a word
    last = ends.index_select(0, mixed) - 1
    masks = (1 << (sizes.unary_bits.index_select(0, mixed) & (WORD_BITS - 1))) - 1
    unary.index_copy_(0, last, unary.index_select(0, last) & masks.to(torch.int32))

    octets = unary.view(torch.uint8).view(-1, 1)
    bits = ((octets >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1).view(-1, WORD_BITS)
    ones = bits.view(-1).cumsum(0, dtype=torch.int32).view(-1, WORD_BITS)
    of_tiles = functional.pad(ones[:, -1], (1, 0)).index_select(0, functional.pad(ends, (1, 0)))
    check_sizes(torch.equal(of_tiles.diff(), cells.to(torch.int32)))
    cell = (ones - bits).add_(tile.unsqueeze(1))  # a zero counts for the one that follows
    numbers = torch.zeros(int(cells.sum()) + len(cells), dtype=torch.int32, device=words.device)
    return numbers.index_add_(0, cell.view(-1), (bits.view(-1) ^ 1).to(torch.int32))


def read_runs(
    form: PatternForm,
    table: Tensor,
    context: Tensor,
    old: Tensor,
    words: Tensor,
    sizes: RunSizes,
    past: Past,
    numel: int,
) -> Tensor:
    """Read the new patterns, (t, TILE), int32.

    Args:
        form: how to read patterns.
        table: the entry of each context, (IDLE,), int32.
        context: that of each value, (t, TILE), int32.
        old: the numbers of the held patterns, of the same shape.
        words: the runs of all tiles, (w,), int32.
        sizes: those of the runs.
        past: what the last differences say.
        numel: the values that do not only fill up a tile.

    Raises:
        ValueError: sizes do not fit.
    """
    is_raw = sizes.is_raw
    own = Instructions.of(form, table, context, is_raw if is_raw.any() else None, numel)
    buckets = _buckets(own)
    ranks = own.is_rice.cumsum(1, dtype=torch.int32)
    cells = torch.stack([ranks[:, -1].to(torch.int64), *(each.cells for each in buckets)], dim=1)
    of_tile = cells.sum(1)
    numbers = _read_unary(words, sizes, of_tile)
    begins = _before(of_tile + 1)
    places = (ranks - own.is_rice).add_(begins.to(torch.int32).unsqueeze(1))
    quotients = numbers.index_select(0, places.view(-1)).view_as(ranks).mul_(own.is_rice)

    words = functional.pad(words, (0, 2))
    begins, field_begins = begins + cells[:, 0], sizes.begins + sizes.unary_bits
    read: list[_Read] = []
    for each in buckets:
        read.append(_Read.of_size(each, numbers, begins, field_begins))
        begins, field_begins = begins + each.cells, field_begins + read[-1].bits
    ends_of_tiles = sizes.begins + WORD_BITS * sizes.words
    check_sizes((field_begins <= ends_of_tiles).all())
    changes = torch.zeros_like(quotients).view(-1)
    escaped = [(quotients >> 4).view(-1).nonzero().view(-1)]
    for of_size in read:
        values = of_size.add_to(changes, words)
        escaped.append(values[changes.index_select(0, values).abs() >= MAX_EVENTS])

    follow, has_fields = torch.cat(escaped), bool(own.width.amax() > 0)
    own.width.view(-1).index_fill_(0, follow, form.bits)
    ends = own.width.cumsum(1, dtype=torch.int32)
    check_sizes(torch.equal(words_of(field_begins - sizes.begins + ends[:, -1]), sizes.words))
    offsets = (ends - own.width).add_(field_begins.to(torch.int32).unsqueeze(1)).view(-1)
    escapes, zigzag = read_fields(words, form.bits, offsets.index_select(0, follow)), quotients << own.shift
    if has_fields:
        low_bits = read_fields(words, own.width.view(-1), offsets).view_as(zigzag)
        zigzag |= low_bits
    value = ((zigzag >> 1) ^ -(zigzag & 1)).mul_(own.turn)
    if not isinstance(past.prediction, int):
        value += past.prediction * own.predicts
    moved = value.mul_(own.is_rice).add_(changes.view_as(value)).mul_(past.sign)
    patterns = form.numbers(moved.add_(old))
    patterns.view(-1).index_copy_(0, follow, escapes)
    if is_raw.any():
        patterns[is_raw] = low_bits[is_raw]
    return patterns


class _Read(NamedTuple):
    """The events of buckets of one size, before their fields are read."""

    of: _Buckets
    tile: Tensor
    """The tile of each event, (e,), int64, ascending."""
    bucket: Tensor
    """The place of its bucket among those of its tile, (e,), int64."""
    offsets: Tensor
    """Where its field begins, (e,), int32."""
    bits: Tensor
    """The bits of fields in each tile, (t,), int64."""

    @classmethod
    def of_size(cls, of: _Buckets, numbers: Tensor, begins: Tensor, field_begins: Tensor) -> _Read:
        """Take the unary numbers of buckets, those of a tile from `begins` on, (t,), and its fields."""
        cells = of.cells
        tile = torch.arange(len(cells), device=numbers.device).repeat_interleave(cells)
        bucket = torch.arange(len(tile), device=numbers.device) - _before(cells).index_select(0, tile)
        events = numbers.index_select(0, bucket + begins.index_select(0, tile)).to(torch.int64)
        per_tile = _per_tile(tile, events, len(cells))
        tile, bucket = tile.repeat_interleave(events), bucket.repeat_interleave(events)
        offsets = _offsets_of_events(tile, per_tile, of.m, field_begins)
        return cls(of, tile, bucket, offsets, per_tile * (of.m + 1))

    def add_to(self, changes: Tensor, words: Tensor) -> Tensor:
        """Read the fields, add the events to the changes of values, (v,), and return which values these are, (e,)."""
        events = read_fields(words, self.of.m + 1, self.offsets)
        rank = (self.bucket << self.of.m) + (events >> 1)
        check_sizes((rank < self.of.counts.index_select(0, self.tile)).all())
        values = self.of.values_at(self.tile, rank)
        changes.index_add_(0, values, 1 - 2 * (events & 1))
        return values
