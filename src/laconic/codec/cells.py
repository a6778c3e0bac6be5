"""The two runs of bits of every tile, unary numbers and fields, in plain torch.

[Note: Codes that decode in parallel] in codec/lossless.py says what they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from laconic.codec.contexts import (
    BUCKET_BITS,
    BUCKETS,
    CODE,
    FLIP,
    MAX_EVENTS,
    MAX_QUOTIENT,
    NONE,
    RAW,
    RICE_CODES,
    TILE,
    Past,
)
from laconic.codec.fused import kept
from laconic.codec.patterns import WORD_BITS, FieldWriter, PatternForm, bits_of_words, read_fields

_RICE, _SHIFT, _WIDTH, _TURN = 7, 8, 13, 18  # the lowest bits of parts of an `instruction`
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
    """The entry of the table and, above it, the others, of which the highest has a sign."""
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
        return cls(packed, (packed >> _RICE) & 1, (packed >> _SHIFT) & 31, (packed >> _WIDTH) & 31)

    @property
    def turn(self) -> Tensor:
        """1 for values whose zigzag numbers begin with minus, else -1."""
        return self.entry >> _TURN

    @property
    def predicts(self) -> Tensor:
        """Whether the prediction is taken off, 0 or 1."""
        return (self.entry >> 6) & 1


@kept
def _instructions(pattern_bits: int, device: torch.device) -> Tensor:
    """Each entry of a table together with its shift, width and sign, packed into one number, (128,), int32."""
    entry = torch.arange(128, dtype=torch.int32, device=device)
    code = entry & CODE
    is_rice = (code < RICE_CODES).to(torch.int32)
    shift = torch.where(code < RICE_CODES, code, _NO_QUOTIENT)
    width = torch.where(code < RICE_CODES, code, pattern_bits * (code == RAW))
    turn = torch.where((entry & FLIP) != 0, 1, -1)
    return (entry | (is_rice << _RICE) | (shift << _SHIFT) | (width << _WIDTH) | (turn << _TURN)).to(torch.int32)


class _Buckets(NamedTuple):
    """The values in buckets, by groups: those of one size and one tile, size by size."""

    counts: Tensor
    """The values of each group, (s, t), int64."""
    running: list[Tensor]
    """Running counts in each tile, of _LANE sizes side by side, (t, TILE), int64."""

    @classmethod
    def of(cls, own: Instructions) -> _Buckets:
        """Count the values in buckets of each size."""
        codes, running, counts = own.entry & CODE, [], []
        largest, lanes = int(codes.amax()), _lanes(codes.device)
        for lane, sizes in enumerate((BUCKET_BITS[:_LANE], BUCKET_BITS[_LANE:])):
            if largest < BUCKETS + sizes[0]:
                break
            running.append(lanes[lane].index_select(0, codes.view(-1)).view_as(codes).cumsum(1))
            counts += [(running[-1][:, -1] >> (_COUNT_BITS * place)) & _COUNT for place in range(len(sizes))]
        return cls(torch.stack(counts) if counts else torch.zeros(0, len(codes), dtype=torch.int64), running)

    @property
    def cells(self) -> Tensor:
        """The buckets, and so unary numbers, of each group, (s, t), int64."""
        m = self.bits
        return (self.counts + ((1 << m) - 1)) >> m

    @property
    def bits(self) -> Tensor:
        """The logarithm of each size, (s, 1), int64."""
        return _bucket_bits(self.counts.device)[: len(self.counts)].unsqueeze(1)

    def ranks_of(self, values: Tensor, places: Tensor) -> Tensor:
        """The ranks of values in buckets of these sizes, (v,), in their group: int64."""
        lanes = torch.stack([each.view(-1).index_select(0, values) for each in self.running])
        counts = lanes.gather(0, (places // _LANE).unsqueeze(0)).squeeze(0)
        return ((counts >> (_COUNT_BITS * (places % _LANE))) & _COUNT) - 1

    def values_at(self, groups: Tensor, ranks: Tensor) -> Tensor:
        """The reverse: the values of these ranks in their groups, (v,), int64."""
        num_places, num_tiles = self.counts.shape
        used = self.counts.amax(1).nonzero().view(-1).tolist()
        begins = torch.arange(num_places * num_tiles, device=groups.device).view(num_places, num_tiles, 1)
        begins <<= _COUNT_BITS
        ascending = torch.stack([
            ((self.running[place // _LANE] >> (_COUNT_BITS * (place % _LANE))) & _COUNT).add_(begins[place])
            for place in used
        ])  # fmt: skip
        found = torch.searchsorted(ascending.view(-1), (groups << _COUNT_BITS) + ranks + 1)
        return found % (num_tiles * TILE)


@kept
def _bucket_bits(device: torch.device) -> Tensor:
    return torch.tensor(BUCKET_BITS, device=device)


@kept
def _lanes(device: torch.device) -> Tensor:
    """The number that each code adds to the running counts of the sizes in a lane, (lanes, 32), int64."""
    lanes = torch.zeros(-(-len(BUCKET_BITS) // _LANE), CODE + 1, dtype=torch.int64)
    for place, m in enumerate(BUCKET_BITS):
        lanes[place // _LANE, BUCKETS + m] = 1 << (_COUNT_BITS * (place % _LANE))
    return lanes.to(device)


@kept
def _places(device: torch.device) -> Tensor:
    """The place of each code's size in BUCKET_BITS, (32,), uint8."""
    places = torch.zeros(CODE + 1, dtype=torch.uint8)
    for place, m in enumerate(BUCKET_BITS):
        places[BUCKETS + m] = place
    return places.to(device)


def _where_few(is_set: Tensor) -> Tensor:
    """The places of the true ones of a number of them that is mostly small, int64: (t, TILE) -> (n,)."""
    rows = is_set.view(-1, 64)
    some = rows.view(torch.int64).view(-1, 8).amax(1).nonzero().view(-1)  # a byte is 0 or 1, so no sign is set
    row, column = rows.index_select(0, some).nonzero().unbind(1)
    return some.index_select(0, row) * 64 + column


def _before(sizes: Tensor) -> Tensor:
    """The sum of all sizes before each, int64."""
    return sizes.cumsum(0) - sizes


def _sums(index: Tensor, numbers: Tensor, size: int) -> Tensor:
    """The sum of the numbers of each index below `size`, (size,), int64."""
    return torch.zeros(size, dtype=torch.int64, device=index.device).index_add_(0, index, numbers)


def _in_groups(sizes: Tensor, index: Tensor, begins: Tensor) -> Tensor:
    """Where each of some things begins, (e,), that lie side by side in their groups, which begin at `begins`, (s, t).

    Shapes: the sizes of things and their groups, ascending, (e,), int64.
    """
    of_groups = _sums(index, sizes, begins.numel())
    return _before(sizes) + (begins.reshape(-1) - _before(of_groups)).index_select(0, index)


class _Events(NamedTuple):
    """The changed values in buckets, group by group."""

    of: _Buckets
    numbers: Tensor
    """The events of each bucket, (c,), int64."""
    group: Tensor
    """The group of each event, (e,), int64, ascending."""
    field: Tensor
    """Of each event the place and the sign, (e,), int32."""
    per_group: Tensor
    """The events of each group, (s, t), int64."""

    @classmethod
    def written(cls, of: _Buckets, values: Tensor, codes: Tensor, changes: Tensor) -> _Events:
        """The events of values, which are those in buckets that have changed, ascending, (v,)."""
        cells, places = of.cells, _places(codes.device).index_select(0, codes)
        places, order = places.sort(stable=True)
        places, values, changes = places.long(), values.index_select(0, order), changes.index_select(0, order)
        group, ranks = places * cells.shape[1] + values // TILE, of.ranks_of(values, places)
        m = _bucket_bits(codes.device).index_select(0, places)
        events = changes.abs().clamp_(max=MAX_EVENTS).to(torch.int64)
        cell = _before(cells.view(-1)).index_select(0, group) + (ranks >> m)
        field = (((ranks & ((1 << m) - 1)) << 1) | (changes < 0)).to(torch.int32)
        return cls(
            of, _sums(cell, events, int(cells.sum())), group.repeat_interleave(events),
            field.repeat_interleave(events), _sums(group, events, cells.numel()).view_as(cells),
        )  # fmt: skip

    @property
    def unary_bits(self) -> Tensor:
        """The bits of unary numbers in each group, (s, t), int64."""
        return self.of.cells + self.per_group

    @property
    def field_bits(self) -> Tensor:
        """The bits of fields in each group, (s, t), int64."""
        return self.per_group * (self.of.bits + 1)

    def ends(self, begins: Tensor) -> Tensor:
        """The places of the ones of all unary numbers, if those of a tile begin at `begins`, (t,)."""
        bits = self.unary_bits
        shifts = (begins + _before(bits)).view(-1) - _before(bits.view(-1)) - 1
        return (self.numbers + 1).cumsum(0) + shifts.repeat_interleave(self.of.cells.view(-1))

    def offsets(self, begins: Tensor) -> Tensor:
        """Where the field of each event begins, (e,), int64, if those of a tile begin at `begins`, (t,)."""
        widths = (self.of.bits + 1).expand_as(self.per_group).reshape(-1).index_select(0, self.group)
        return _in_groups(widths, self.group, begins + _before(self.field_bits))


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
    sizes = run.sizes
    is_long = (sizes.words >= raw_words(form, numel, len(context), context.device)) & (sizes.unary_bits > 0)
    if is_long.any():
        run = _Written.of(form, Instructions.of(form, table, context, is_long, numel), folded, past)
        sizes = run.sizes
    return run.words(form, patterns, sizes), sizes


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
    """Where the unary number of each Rice code ends in its tile, (t, TILE), int64; others end with the last one."""
    field_ends: Tensor
    """Where the field of each value ends in its tile, without events, (t, TILE), int64."""
    has_fields: bool
    """Whether others than the escaped have fields."""
    events: _Events | None

    @classmethod
    def of(cls, form: PatternForm, own: Instructions, folded: Tensor, past: Past) -> _Written:
        value = folded if isinstance(past.prediction, int) else folded - past.prediction * own.predicts
        turned = value * own.turn
        zigzag = (turned << 1) ^ (turned >> 31)
        quotients = (zigzag >> own.shift).clamp_(max=MAX_QUOTIENT)
        escaped = [_where_few(quotients >= MAX_QUOTIENT)]
        unary_ends = quotients.add_(own.is_rice).cumsum(1)
        buckets, events = _Buckets.of(own), None
        if buckets.running:
            is_changed = folded * (own.entry & BUCKETS)  # the bit that only their codes have
            changed = is_changed.view(-1).nonzero().view(-1)
            changes = folded.view(-1).index_select(0, changed)
            escaped.append(changed[changes.abs() >= MAX_EVENTS])
            codes = own.entry.view(-1).index_select(0, changed) & CODE
            events = _Events.written(buckets, changed, codes, changes)
        raw = torch.cat(escaped)
        has_fields = bool(own.width.amax() > 0)
        own.width.view(-1).index_fill_(0, raw, form.bits)
        return cls(own, zigzag, raw, unary_ends, own.width.cumsum(1), has_fields, events)

    @property
    def sizes(self) -> RunSizes:
        """The sizes of both runs."""
        unary, fields = self.unary_ends[:, -1], self.field_ends[:, -1]
        if self.events is not None:
            unary, fields = unary + self.events.unary_bits.sum(0), fields + self.events.field_bits.sum(0)
        return RunSizes(unary, words_of(unary + fields))

    def words(self, form: PatternForm, patterns: Tensor, sizes: RunSizes) -> Tensor:
        """Write both runs."""
        begins = sizes.begins
        writer = FieldWriter(int(sizes.words.sum()), begins.device)
        # a value without a Rice code writes nothing, where the last unary number ends, or before all of them
        ends = (self.unary_ends + (begins - 1).unsqueeze(1)).clamp_(min=0)
        writer.write(self.own.is_rice.view(-1), ends.view(-1))
        begins = begins + self.unary_ends[:, -1]
        if self.events is not None:
            ends = self.events.ends(begins)
            writer.write(torch.ones_like(ends), ends)
            begins = begins + self.events.unary_bits.sum(0)
            writer.write(self.events.field, self.events.offsets(begins))
            begins = begins + self.events.field_bits.sum(0)
        offsets = (self.field_ends - self.own.width).add_(begins.unsqueeze(1)).view(-1)
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
    tile = torch.arange(len(cells), device=words.device).repeat_interleave(own_words)
    index = torch.arange(len(tile), device=words.device)
    shifts = _before(sizes.words) - _before(own_words)
    unary = words.index_select(0, index + shifts.index_select(0, tile))
    ends = own_words.cumsum(0)
    mixed = (sizes.unary_bits & (WORD_BITS - 1)).nonzero().view(-1)  # the tiles whose fields begin within a word
    last = ends.index_select(0, mixed) - 1
    masks = (1 << (sizes.unary_bits.index_select(0, mixed) & (WORD_BITS - 1))) - 1
    unary.index_copy_(0, last, unary.index_select(0, last) & masks.to(torch.int32))

    bits = bits_of_words(unary)
    ones = bits.cumsum(0).view(-1, WORD_BITS)
    of_tiles = functional.pad(ones[:, -1], (1, 0)).index_select(0, functional.pad(ends, (1, 0)))
    check_sizes(torch.equal(of_tiles.diff(), cells))
    cell = ones.add_(tile.unsqueeze(1))  # a zero counts for the one that follows
    numbers = torch.zeros(int(cells.sum()) + len(cells), dtype=torch.int32, device=words.device)
    return numbers.scatter_add_(0, cell.view(-1), (bits ^ 1).to(torch.int32))


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
    buckets = _Buckets.of(own)
    ranks, bucket_cells = own.is_rice.cumsum(1, dtype=torch.int32), buckets.cells
    of_tile = ranks[:, -1] + bucket_cells.sum(0)
    numbers = _read_unary(words, sizes, of_tile)
    begins = _before(of_tile + 1)
    places = (ranks - own.is_rice).add_(begins.to(torch.int32).unsqueeze(1))
    quotients = numbers.index_select(0, places.view(-1)).view_as(ranks).mul_(own.is_rice)

    words = functional.pad(words, (0, 2))
    escaped = [_where_few(quotients >= MAX_QUOTIENT)]
    changes, field_begins = torch.zeros_like(quotients).view(-1), sizes.begins + sizes.unary_bits
    if buckets.running:
        events = _Read.of_buckets(buckets, numbers, begins + ranks[:, -1] + _before(bucket_cells))
        check_sizes((field_begins + events.bits.sum(0) <= sizes.begins + WORD_BITS * sizes.words).all())
        values = events.add_to(changes, words, field_begins + _before(events.bits))
        field_begins = field_begins + events.bits.sum(0)
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
    """The events of buckets before their fields are read."""

    of: _Buckets
    group: Tensor
    """The group of each event, (e,), int64, ascending."""
    bucket: Tensor
    """The place of its bucket in the group, (e,), int64."""
    bits: Tensor
    """The bits of fields in each group, (s, t), int64."""

    @classmethod
    def of_buckets(cls, of: _Buckets, numbers: Tensor, begins: Tensor) -> _Read:
        """Take the unary numbers of buckets, those of a group from `begins` on, (s, t)."""
        cells = of.cells.view(-1)
        group = torch.arange(len(cells), device=numbers.device).repeat_interleave(cells)
        bucket = torch.arange(len(group), device=numbers.device) - _before(cells).index_select(0, group)
        events = numbers.index_select(0, bucket + begins.view(-1).index_select(0, group)).to(torch.int64)
        bits = _sums(group, events, len(cells)).view_as(begins) * (of.bits + 1)
        return cls(of, group.repeat_interleave(events), bucket.repeat_interleave(events), bits)

    def add_to(self, changes: Tensor, words: Tensor, begins: Tensor) -> Tensor:
        """Read the fields, which begin at `begins`, (s, t), and add the events to the changes of values, (v,).

        Returns which values these are, (e,).
        """
        m = self.of.bits.expand_as(begins).reshape(-1).index_select(0, self.group)
        events = read_fields(words, (m + 1).to(torch.int32), _in_groups(m + 1, self.group, begins))
        rank = (self.bucket << m) + (events >> 1)
        check_sizes((rank < self.of.counts.view(-1).index_select(0, self.group)).all())
        values = self.of.values_at(self.group, rank)
        changes.index_add_(0, values, 1 - 2 * (events & 1))
        return values
