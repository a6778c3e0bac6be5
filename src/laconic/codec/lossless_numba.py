"""Lossless differences on a CPU, compiled by numba: each tile is a few loops over its values.

These loops keep a tile in the caches of a processor. They hold no lock of Python. Payloads are those of the oracle,
tests/reference/lossless.py.

Work that needs no order is a loop of its own over a tile, in int32: the compiler turns that into vector instructions.
numba widens sums and products to int64, so each step of these says that it is an int32. The rest is left for short
loops without branches, as the processor cannot foresee the bits of a payload. To write, four fields are put together
first, which mostly have at most 64 bits. The values in buckets seldom change, so they are found by bits that say which
values have a code, 64 in a word. Events cost time, and values do not.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# numba types the functions that it compiles

from __future__ import annotations

import inspect

import numpy as np
import torch
from torch import Tensor

from laconic.codec import bits_numba, contexts
from laconic.codec.bits_numba import (
    LANES,
    SPARE,
    insert,
    leading_zeros,
    list_octets,
    list_ones,
    num_ones,
    put_all,
    put_field,
    put_run,
    right,
    start,
    trailing_zeros,
    where,
    window,
)
from laconic.codec.contexts import BLOCK, CLASSES, IDLE, TILE, head_bytes
from laconic.codec.loops import array_of, compiled
from laconic.codec.patterns import PatternForm

_BLOCKS = TILE // BLOCK
_RICE_CODES, _RAW, _NONE, _BUCKETS = contexts.RICE_CODES, contexts.RAW, contexts.NONE, contexts.BUCKETS
_CODE, _FLIP = contexts.CODE, contexts.FLIP
_LOWEST_BASE, _MAX_LEVEL = contexts.LOWEST_BASE, contexts.MAX_LEVEL
_STEP_BITS, _MAX_STEP = contexts.STEP_BITS, contexts.MAX_STEP
_MAX_QUOTIENT, _MAX_EVENTS = contexts.MAX_QUOTIENT, contexts.MAX_EVENTS
_CODES = np.array(contexts.CODES, dtype=np.uint8)
_SIZES, _BITS = len(contexts.BUCKET_BITS), np.array(contexts.BUCKET_BITS, dtype=np.int64)
_IS_SIZE = np.isin(np.arange(_CODE + 1) - _BUCKETS, _BITS)
"""Of each code."""
_MOST_WORDS = TILE  # of 64 bits, in a run: no value takes more bits
_MOST_UNARY_BITS = 1 << 16  # of a tile, as its head can say
_JOINED = 4  # fields that are put together
_WIDTH, _UNARY = 16, 21  # the lowest bits of a value's parts, see `_code`

_constants = repr([(name, value) for name, value in sorted(vars(contexts).items()) if isinstance(value, int | tuple)])
_compiled = compiled(_constants.encode(), inspect.getsource(bits_numba).encode())


def encode(form: PatternForm, held: Tensor, new: Tensor) -> Tensor:
    """The payload of differences, (bytes,), uint8, which may be longer than the new values. Shapes: (n,) each."""
    olds, news, numel = array_of(form.patterns(held)), array_of(form.patterns(new)), len(held)
    (levels, base, sizes), head_words = _tiles(numel), (head_bytes(numel) + 3) // 4
    words = np.empty(head_words + len(base) * (TILE * form.bits // 32), np.uint32)
    num_words = _write(olds, news, *_form(form), _CODES, levels, base, words[head_words:], sizes)
    octets = words[: head_words + num_words].view(np.uint8)
    _write_head(sizes, base, levels[: -(-numel // BLOCK)], octets[: 4 * head_words])
    return torch.from_numpy(octets)


def decode(form: PatternForm, held: Tensor, payload: Tensor) -> Tensor | None:
    """The new patterns, (n,), int16; None if the sizes in the payload do not fit the held values.

    Shapes: held (n,); payload (bytes,), uint8: whole words, with at least the known parts of a head.
    """
    num_words, new = len(payload) // 4, torch.empty(len(held), dtype=torch.int16)
    words = np.zeros(num_words + SPARE, np.uint32)
    octets = words[:num_words].view(np.uint8)
    octets[:] = array_of(payload)
    levels, base, sizes = _tiles(len(new))
    table = np.empty(CLASSES, np.uint8)
    head_words = _read_head(octets, sizes, base, levels[: -(-len(new) // BLOCK)], table)
    if head_words is None or num_words != head_words + sizes[:, 1].sum():
        return None
    olds, runs = array_of(form.patterns(held)), words[head_words:]
    return new if _read(olds, *_form(form), levels, base, table, runs, sizes, array_of(new)) else None


def _tiles(numel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Room for the levels of all tiles' blocks, zeros, their bases and their sizes."""
    tiles = -(-numel // TILE)
    return np.zeros(tiles * _BLOCKS, np.int32), np.empty(tiles, np.int32), np.empty((tiles, 2), np.int64)


def _form(form: PatternForm) -> tuple[int, np.int32]:
    return form.bits, np.int32(-1 if form.mantissa_bits is None else form.mantissa_bits)


@_compiled
def _num_buckets(num_values, m):
    return (num_values + ((1 << m) - 1)) >> m


# -- what both sides know ----------------------------------------------------------------------------------------------


@_compiled
def signs(bits, mantissa):
    """The place of a pattern's sign, and the bits that a sign turns over: [Note: Numbers in the order of values]."""
    return np.int32(bits - 1), np.int32((1 << (bits - 1)) - 1 if mantissa >= 0 else 0)


@_compiled
def number(pattern, sign, half):
    """The number of a pattern, and the reverse. See `signs`."""
    return np.int32(pattern ^ np.int32(right(pattern, sign) & half))


@_compiled
def find_exponents(patterns, bits, mantissa, exponents):
    """The exponents of a tile's patterns; that of zeros fills it up."""
    if mantissa < 0:
        exponents[:] = 1
        return
    mask = np.int32((1 << (bits - 1 - mantissa)) - 1)
    for i in range(len(patterns)):
        exponents[i] = max(np.int32(right(patterns[i], mantissa) & mask), np.int32(1))
    exponents[len(patterns) :] = 1


@_compiled
def find_contexts(exponents, levels, base, num, context):
    """The context of each of the `num` values of a tile whose blocks have these levels; idle ones fill it up."""
    most = np.int32(CLASSES - 1)
    for block in range(_BLOCKS):
        of_block = context[block * BLOCK : (block + 1) * BLOCK]
        if levels[block] == 0:
            of_block[:] = IDLE
            continue
        own, scale = exponents[block * BLOCK : (block + 1) * BLOCK], np.int32(levels[block] + base)
        for i in range(BLOCK):
            of_block[i] = min(max(np.int32(scale - own[i]), np.int32(0)), most)
    context[num:] = IDLE


@_compiled
def _look_up(context, table, entries):
    """The entry of each value of a tile by its context. Idle values have NONE."""
    lowest, highest = np.uint8(IDLE), np.uint8(0)
    for i in range(TILE):
        lowest = min(lowest, context[i])
        highest = max(highest, context[i] if context[i] < IDLE else np.uint8(0))
    for i in range(TILE):
        entries[i] = np.uint8(_NONE) if context[i] == IDLE else np.uint8(0)
    for each in range(lowest, highest + 1):  # some ten: to compare all with each takes less time
        own, entry = np.uint8(each), table[each]
        for i in range(TILE):
            entries[i] |= entry if context[i] == own else np.uint8(0)


@_compiled
def find_differences(held, new, bits, mantissa, moved):
    """The differences of a tile; zeros fill it up."""
    sign, half = signs(bits, mantissa)
    for i in range(len(held)):
        old, fresh = np.int32(held[i]), np.int32(new[i])
        moved[i] = number(fresh, sign, half) - number(old, sign, half)
    moved[len(held) :] = 0


# -- encode ------------------------------------------------------------------------------------------------------------


@_compiled
def find_scales(exponents, moved, levels):
    """Find the levels of a tile's blocks; its base."""
    scales, highest = np.empty(_BLOCKS, np.int32), _LOWEST_BASE
    for block in range(_BLOCKS):
        own, of_own = moved[block * BLOCK : (block + 1) * BLOCK], exponents[block * BLOCK : (block + 1) * BLOCK]
        top, changed, total = np.int32(0), np.int32(0), np.int32(0)
        for i in range(BLOCK):
            top = max(top, np.int32(of_own[i]))
            changed |= own[i]
        levels[block] = changed != 0
        if changed:
            for i in range(BLOCK):
                below = min(np.int32(top - of_own[i]), np.int32(30))
                total = np.int32(total + min(right(abs(own[i]) << _STEP_BITS, below), np.int32(_MAX_STEP)))
            scales[block] = top - _STEP_BITS + 32 - leading_zeros(total)
            highest = max(highest, scales[block])
    base = min(max(highest - _MAX_LEVEL, _LOWEST_BASE), _LOWEST_BASE + 255)
    for block in range(_BLOCKS):
        if levels[block]:
            levels[block] = min(max(scales[block] - base, 1), _MAX_LEVEL)
    return base


@_compiled
def _code(moved, entries, new, bits, coded):
    """Find of each value its field, 16 bits, the width of it, 5 bits, and that of its unary number: all in one int32.

    Returns the sums of the widths of unary numbers and of fields, and whether there are buckets.
    """
    mask, whole = np.int32((1 << bits) - 1), np.int32(bits)
    unary_bits, field_bits, codes = np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(new)):
        code, value, pattern = np.int32(entries[i]), np.int32(-moved[i]), np.int32(new[i] & mask)
        is_rice = code < _RICE_CODES
        low = code if is_rice else np.int32(0)
        zigzag = np.int32(np.int32(value << 1) ^ np.int32(value >> 31))
        # in a bucket, the smaller zigzag number of a value with as many events as mean that its pattern follows
        limit = np.int32(np.int32(_MAX_QUOTIENT) << low) if is_rice else np.int32(2 * _MAX_EVENTS - 1)
        escapes = (zigzag >= limit) | (code == _RAW)
        unary = np.int32(min(right(zigzag, low), np.int32(_MAX_QUOTIENT)) + 1) if is_rice else np.int32(0)
        width = whole if escapes else low
        field = pattern if escapes else np.int32(zigzag & np.int32(np.int32(1 << low) - 1))
        unary_bits = np.int32(unary_bits + unary)
        field_bits = np.int32(field_bits + width)
        codes |= code
        coded[i] = field | np.int32(width << _WIDTH) | np.int32(unary << _UNARY)
    coded[len(new) :] = 0
    return unary_bits, field_bits, codes & _BUCKETS != 0


@_compiled
def _join_unaries(coded, joined, widths):
    """Put the unary numbers of four neighbours together; the width of the widest."""
    begin, one, below_64, most = np.uint64(_UNARY), np.uint64(1), np.uint64(63), np.uint64(0)
    for i in range(TILE // _JOINED):
        first, second = np.uint64(coded[4 * i]) >> begin, np.uint64(coded[4 * i + 1]) >> begin
        third, fourth = np.uint64(coded[4 * i + 2]) >> begin, np.uint64(coded[4 * i + 3]) >> begin
        two = ((one << first) >> one) | (((one << second) >> one) << first)
        three = two | (((one << third) >> one) << (first + second))
        before = first + second + third
        joined[i] = three | (((one << fourth) >> one) << (before & below_64))
        widths[i] = before + fourth
        most = max(most, before + fourth)
    return most


@_compiled
def _join_fields(coded, joined, widths):
    """Put the fields of four neighbours together, which have at most 64 bits."""
    begin, field, width = np.uint64(_WIDTH), np.uint64(0xFFFF), np.uint64(31)
    for i in range(TILE // _JOINED):
        first, second = np.uint64(coded[4 * i]), np.uint64(coded[4 * i + 1])
        third, fourth = np.uint64(coded[4 * i + 2]), np.uint64(coded[4 * i + 3])
        one = (first >> begin) & width
        two = one + ((second >> begin) & width)
        three = two + ((third >> begin) & width)
        low, high = (first & field) | ((second & field) << one), ((third & field) << two) | ((fourth & field) << three)
        joined[i] = low | high
        widths[i] = three + ((fourth >> begin) & width)


@_compiled
def _put_unaries(run, coded, joined, widths):
    """Write the unary numbers of Rice codes, with which a run begins; its end."""
    end = start()
    if _join_unaries(coded, joined, widths) <= 64:
        return put_all(run, end, joined, widths)
    for i in range(TILE):  # one by one, as some four are too wide
        width = np.uint64(coded[i] >> _UNARY)
        end = put_field(run, end, (np.uint64(1) << width) >> np.uint64(1), width)
    return end


@_compiled
def _collect(entries, moved, changes, num_values, num_events, zeros, events):
    """Collect the events of the values in buckets, size by size: the zeros of unary numbers, as ones, and the fields.

    The j-th event of a size is a zero behind j others and the ones of all buckets before.
    """
    for i in range(TILE):
        changes[i] = min(max(moved[i], np.int32(-_MAX_EVENTS)), np.int32(_MAX_EVENTS))
    for size in range(_SIZES):
        m = _BITS[size]
        before, num, code = 0, 0, np.uint8(_BUCKETS + m)
        for first in range(0, TILE, LANES):
            members = where(entries, first, code)
            left = members & ~where(changes, first, np.uint8(0))
            while left:
                value = np.int64(np.int8(changes[first + np.int64(trailing_zeros(left))]))
                rest = left & (left - np.uint64(1))
                rank = before + np.int64(num_ones(members & ((left ^ rest) - np.uint64(1))))
                field = np.uint64((rank & ((1 << m) - 1)) << 1 | (value < 0))
                for _ in range(abs(value)):
                    insert(zeros[size], num + (rank >> m), np.uint64(1), 1)
                    insert(events[size], num * (m + 1), field, m + 1)
                    num += 1
                left = rest
            before += np.int64(num_ones(members))
        num_values[size], num_events[size] = before, num


@_compiled
def _put_buckets(run, end, num_values, num_events, zeros, events):
    """Write what `_collect` has collected, and make zeros of it; the new end."""
    for size in range(_SIZES):
        num_bits = num_events[size] + _num_buckets(num_values[size], _BITS[size])
        end = put_run(run, end, zeros[size], num_bits, ~np.uint64(0))
    for size in range(_SIZES):
        end = put_run(run, end, events[size], num_events[size] * (_BITS[size] + 1), np.uint64(0))
    return end


@_compiled
def _write(held, new, bits, mantissa, table, levels, base, words, sizes):
    """Find the scales of all tiles, and write their runs; the number of all words.

    `sizes` gets for each tile the bits of its unary numbers and its words.
    """
    exponents, context, entries = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    moved, coded, changes = np.empty(TILE, np.int32), np.empty(TILE, np.int32), np.empty(TILE, np.uint8)
    joined, widths = np.empty(TILE // _JOINED, np.uint64), np.empty(TILE // _JOINED, np.uint8)
    num_values, num_events = np.zeros(_SIZES, np.int64), np.zeros(_SIZES, np.int64)
    zeros, events = np.zeros((_SIZES, _MOST_WORDS // 4), np.uint64), np.zeros((_SIZES, _MOST_WORDS), np.uint64)
    run, num_words = np.empty(2 * _MOST_WORDS, np.uint64), 0
    for tile in range(len(base)):
        first, behind = tile * TILE, min((tile + 1) * TILE, len(held))
        own, own_levels = new[first:behind], levels[tile * _BLOCKS : (tile + 1) * _BLOCKS]
        sizes[tile, 0] = sizes[tile, 1] = 0
        find_differences(held[first:behind], own, bits, mantissa, moved)
        find_exponents(held[first:behind], bits, mantissa, exponents)
        base[tile] = find_scales(exponents, moved, own_levels)
        if not own_levels.any():
            continue
        find_contexts(exponents, own_levels, base[tile], len(own), context)
        _look_up(context, table, entries)
        unary_bits, field_bits, has_buckets = _code(moved, entries, own, bits, coded)
        if has_buckets:
            _collect(entries, moved, changes, num_values, num_events, zeros, events)
            for size in range(_SIZES):
                unary_bits += num_events[size] + _num_buckets(num_values[size], _BITS[size])
                field_bits += num_events[size] * (_BITS[size] + 1)
        own_words, raw_words = (unary_bits + field_bits + 31) >> 5, (len(own) * bits + 31) >> 5
        end = _put_unaries(run, coded, joined, widths)
        if has_buckets:
            end = _put_buckets(run, end, num_values, num_events, zeros, events)
        if own_words >= raw_words:  # the patterns instead
            own_words, unary_bits, end, entries[:] = raw_words, 0, start(), _RAW
            _code(moved, entries, own, bits, coded)
        _join_fields(coded, joined, widths)
        end = put_all(run, end, joined, widths)
        run[end.word] = end.part
        for index in range(own_words):
            words[num_words + index] = np.uint32(run[index >> 1] >> np.uint64(32 * (index & 1)))
        num_words += own_words
        sizes[tile, 0], sizes[tile, 1] = unary_bits, own_words
    return num_words


@_compiled
def _write_head(sizes, base, levels, head):
    """Write the head of a payload, which names no code: [Note: Codes that decode in parallel]."""
    head[:] = 0
    at = 0
    for tile in range(len(sizes)):
        for size in sizes[tile]:
            head[at], head[at + 1] = size & 255, size >> 8
            at += 2
    for tile in range(len(base)):
        head[at] = base[tile] - _LOWEST_BASE
        at += 1
    for block in range(len(levels)):
        head[at + (block >> 1)] |= levels[block] << 4 * (block & 1)


# -- decode ------------------------------------------------------------------------------------------------------------


@_compiled
def _read_head(payload, sizes, base, levels, table):
    """Read the head of a payload; its words, or None if it is cut short."""
    at = 0
    for tile in range(len(sizes)):
        for part in range(2):
            sizes[tile, part] = np.int64(payload[at]) | np.int64(payload[at + 1]) << 8
            at += 2
    for tile in range(len(base)):
        base[tile] = np.int32(payload[at]) + _LOWEST_BASE
        at += 1
    for block in range(len(levels)):
        levels[block] = (payload[at + (block >> 1)] >> 4 * (block & 1)) & 15
    is_named = at + ((len(levels) + 1) >> 1)
    at = is_named + CLASSES
    for context in range(CLASSES):
        table[context] = _CODES[context]
        if payload[is_named + context]:
            if at == len(payload):
                return None
            table[context] = _known(payload[at])
            at += 1
    return (at + 3) >> 2


@_compiled
def _known(entry):
    """An entry of a table, without what means nothing: buckets have no other bits, and no unknown sizes."""
    code = entry & _CODE
    if code >= _BUCKETS:
        return np.uint8(code if _IS_SIZE[code] else _NONE)
    return np.uint8(entry & (_CODE | _FLIP))


@_compiled
def _find_ends(words, num_bits, num, ends):
    """Find where the unary numbers end that a run begins with; whether they are so many, and take all of these bits.

    The end of each comes one place later, behind that of a number before all.
    """
    listed, num_words = np.uint64(1), (num_bits + 63) >> 6
    ends[0] = -1
    for index in range(num_words):
        ones = np.uint64(words[2 * index]) | (np.uint64(words[2 * index + 1]) << np.uint64(32))
        if index == num_words - 1:
            ones &= ~np.uint64(0) >> np.uint64(-num_bits & 63)
        if np.int64(listed + num_ones(ones)) > num + 1:
            return False
        listed = list_ones(ones, 64 * index, ends, listed)
    return np.int64(listed) == num + 1 and ends[num] == num_bits - 1


@_compiled
def _list_members(entries, members, num_values):
    """List the values of each size of buckets; the buckets of all."""
    num_buckets = 0
    for size in range(_SIZES):
        num_values[size] = list_octets(entries, np.uint8(_BUCKETS + _BITS[size]), np.uint64(0), members[size])
        num_buckets += _num_buckets(num_values[size], _BITS[size])
    return num_buckets


@_compiled
def _add_events(words, first, behind, at, m, members, zeros, moved):
    """Add the events of the buckets of one size to their values; whether all are values of this size.

    Their unary numbers lie from `first` to `behind`, and their fields from `at` on.
    """
    num = np.uint64(0)
    for begin in range(first, behind, 32):
        mask = (np.uint64(1) << np.uint64(min(behind - begin, 32))) - np.uint64(1)
        num = list_ones(~window(words, np.uint64(begin)) & mask, begin - first, zeros, num)
    for index in range(np.int64(num)):
        field = np.int64(window(words, np.uint64(at + index * (m + 1)))) & ((1 << (m + 1)) - 1)
        rank = ((zeros[index] - index) << m) + (field >> 1)
        if rank >= len(members):
            return False
        moved[members[rank]] += 1 - 2 * (field & 1)
    return True


@_compiled
def _read_buckets(words, num_bits, num_rice, ends, at, members, num_values, zeros, moved):
    """Add the events of all sizes, whose fields begin at `at`; the place behind these, or -1 if they do not fit."""
    before = num_rice
    for size in range(_SIZES):
        m, num_buckets = _BITS[size], _num_buckets(num_values[size], _BITS[size])
        first, behind = np.int64(ends[before]) + 1, np.int64(ends[before + num_buckets]) + 1
        field_bits = (behind - first - num_buckets) * (m + 1)
        own = members[size, : num_values[size]]
        if at + field_bits > num_bits or not _add_events(words, first, behind, at, m, own, zeros, moved):
            return -1
        at, before = at + field_bits, before + num_buckets
    return at


@_compiled
def _find_quotients(entries, ends, num_rice, octets, places, quotients):
    """The quotients of Rice codes; others have any number. `octets` and `places` have room for a number of each value.

    If few values have such codes, they are listed. If many have, each value takes the quotient that is next.
    """
    if num_rice == TILE:
        for i in range(TILE):
            quotients[i] = ends[i + 1] - ends[i] - 1
        return
    for i in range(TILE):
        octets[i] = entries[i] & _CODE < _RICE_CODES
    if num_rice < TILE // 4:
        quotients[:] = 0
        list_octets(octets, np.uint8(1), np.uint64(0), places)
        for index in range(num_rice):
            quotients[places[index]] = ends[index + 1] - ends[index] - 1
        return
    for index in range(num_rice):
        places[index] = ends[index + 1] - ends[index] - 1
    following = np.uint64(0)
    for i in range(TILE):
        quotients[i] = places[following]
        following += np.uint64(octets[i])


@_compiled
def _find_widths(entries, moved, bits, quotients, widths):
    """Find the width of each value's field; their sum. Values whose pattern follows get the largest quotient."""
    total, whole = np.int32(0), np.int32(bits)
    for i in range(TILE):
        code = np.int32(entries[i] & _CODE)
        is_rice = code < _RICE_CODES
        is_wild = np.int32(abs(moved[i])) >= _MAX_EVENTS
        escapes = quotients[i] >= _MAX_QUOTIENT if is_rice else (code == _RAW) | is_wild
        width = whole if escapes else (code if is_rice else np.int32(0))
        quotients[i] = np.int32(_MAX_QUOTIENT) if escapes else (quotients[i] if is_rice else np.int32(0))
        widths[i] = width
        total = np.int32(total + width)
    return total


@_compiled
def _read_fields(words, at, num_bits, widths, places, fields):
    """Read the field of each value that has one, and what follows it: two at once, or one by one if they are few."""
    if num_bits < TILE // 2:
        for index in range(list_octets(widths, np.uint8(0), ~np.uint64(0), places)):
            i = np.uint64(places[index])
            fields[i] = np.int32(window(words, at))
            at += np.uint64(widths[i])
        return
    for i in range(0, TILE, 2):
        both, width = window(words, at), np.uint64(widths[i])
        fields[i], fields[i + 1] = np.int32(both), np.int32(both >> width)
        at += width + np.uint64(widths[i + 1])


@_compiled
def _turn(entries, quotients, fields, moved):
    """Find the differences of values with Rice codes."""
    for i in range(TILE):
        entry = np.int32(entries[i])
        low = np.int32(entry & 15)
        zigzag = np.int32(np.int32(quotients[i] << low) | np.int32(fields[i] & np.int32(np.int32(1 << low) - 1)))
        value = np.int32(np.int32(zigzag >> 1) ^ np.int32(-np.int32(zigzag & 1)))
        value = value if entry & _FLIP else np.int32(-value)
        moved[i] = value if np.int32(entry & _CODE) < _RICE_CODES else moved[i]


@_compiled
def _move(held, moved, quotients, fields, bits, mantissa, new):
    """The new patterns of a tile."""
    (sign, half), mask = signs(bits, mantissa), np.int32((1 << bits) - 1)
    for i in range(len(held)):
        pattern = number(np.int32(number(np.int32(held[i]), sign, half) + moved[i]), sign, half)
        field, escapes = np.int32(fields[i] & mask), quotients[i] >= _MAX_QUOTIENT
        new[i] = field if escapes else pattern


@_compiled
def _read(held, bits, mantissa, levels, base, table, words, sizes, new):
    """Read the new patterns of all tiles; whether all sizes agree. SPARE words lie behind those of all tiles."""
    exponents, context, entries = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    quotients, widths, fields = np.empty(TILE, np.int32), np.empty(TILE, np.uint8), np.empty(TILE, np.int32)
    moved, places = np.empty(TILE, np.int32), np.empty(TILE + SPARE, np.int32)
    ends, zeros = np.empty(1 + TILE + SPARE, np.int32), np.empty(_MOST_UNARY_BITS + SPARE, np.int32)
    members, num_values = np.empty((_SIZES, TILE + SPARE), np.int32), np.zeros(_SIZES, np.int64)
    first_word = 0
    for tile in range(len(base)):
        first, behind = tile * TILE, min((tile + 1) * TILE, len(held))
        own, own_levels = held[first:behind], levels[tile * _BLOCKS : (tile + 1) * _BLOCKS]
        unary_bits, num_words = sizes[tile, 0], sizes[tile, 1]
        run = words[first_word : first_word + num_words + SPARE]
        first_word += num_words
        if unary_bits > 32 * num_words:
            return False
        if num_words == 0:
            if own_levels.any():
                return False
            new[first:behind] = own
            continue
        if unary_bits == 0:  # patterns
            entries[: len(own)], entries[len(own) :] = _RAW, _NONE
        else:
            find_exponents(own, bits, mantissa, exponents)
            find_contexts(exponents, own_levels, base[tile], len(own), context)
            _look_up(context, table, entries)
        num_rice, codes = 0, np.uint8(0)
        for i in range(TILE):
            num_rice += entries[i] & _CODE < _RICE_CODES
            codes |= entries[i]
        has_buckets, at = codes & _BUCKETS != 0, unary_bits
        num_buckets = _list_members(entries, members, num_values) if has_buckets else 0
        if not _find_ends(run, unary_bits, num_rice + num_buckets, ends):
            return False
        moved[:] = 0
        if has_buckets:
            at = _read_buckets(run, 32 * num_words, num_rice, ends, at, members, num_values, zeros, moved)
        _find_quotients(entries, ends, num_rice, widths, places, quotients)
        field_bits = _find_widths(entries, moved, bits, quotients, widths)
        if at < 0 or (at + field_bits + 31) >> 5 != num_words:
            return False
        _read_fields(run, np.uint64(at), field_bits, widths, places, fields)
        _turn(entries, quotients, fields, moved)
        _move(own, moved, quotients, fields, bits, mantissa, new[first:behind])
    return True
