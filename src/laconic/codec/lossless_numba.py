"""Lossless differences on a CPU, compiled by numba: each tile is one loop over its values.

Payloads have the bytes of the plain chain in codec/lossless.py, and so have values; an error is found where it finds
one. The chain takes some fifty operations on all values, each of which reads and writes memory; these loops keep a tile
in the caches of a processor and take a tenth of the time. They hold no lock of Python.

Runs are written by position: a unary number sets the bit at its end, as all bits are zeros before. What needs no order
is done for a whole tile in loops of their own, in int32, which the compiler makes vector instructions of.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# numba types the functions that it compiles

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from laconic.codec import contexts
from laconic.codec.loops import compiled
from laconic.codec.patterns import PatternForm

_TILE, _BLOCK, _BLOCKS = contexts.TILE, contexts.BLOCK, contexts.TILE // contexts.BLOCK
_CLASSES, _RANKS, _IDLE = contexts.CLASSES, contexts.RANKS, contexts.IDLE
_RICE_CODES, _RAW, _NONE, _BUCKETS = contexts.RICE_CODES, contexts.RAW, contexts.NONE, contexts.BUCKETS
_CODE, _FLIP, _PREDICT = contexts.CODE, contexts.FLIP, contexts.PREDICT
_MAX_QUOTIENT, _MAX_EVENTS, _MAX_LEVEL = contexts.MAX_QUOTIENT, contexts.MAX_EVENTS, contexts.MAX_LEVEL
_LOWEST_BASE, _STEP_BITS, _MAX_STEP = contexts.LOWEST_BASE, contexts.STEP_BITS, contexts.MAX_STEP
_EXACT_BINS, _BINS = contexts.EXACT_BINS, contexts.BINS
_SIZES = len(contexts.BUCKET_BITS)
_BITS = np.array(contexts.BUCKET_BITS, dtype=np.int64)
_MOST_WORDS = _TILE  # of 64 bits, in a run: no value takes more bits
_SIZE_OF_CODE = np.full(32, -1, dtype=np.int64)
_SIZE_OF_CODE[_BUCKETS + _BITS] = np.arange(_SIZES)
_RANK, _, _PREDICTION = contexts.past_tables(torch.device("cpu")).numpy()
"""By the last difference, from -128 on."""


_compiled = compiled(
    repr([(name, value) for name, value in sorted(vars(contexts).items()) if isinstance(value, int | tuple)]).encode(),
    _RANK.tobytes(),
    _PREDICTION.tobytes(),
)


class Scales(NamedTuple):
    """The scales of all tiles, and the sample by which codes are chosen."""

    levels: Tensor
    """(t, blocks), int32."""
    base: Tensor
    """(t,), int32."""
    histogram: Tensor
    """The differences of the sample by context and bin, (IDLE, BINS), int32."""
    rest: Tensor | None
    """The same of what predictions leave; None without last differences."""


def scales(form: PatternForm, held: Tensor, new: Tensor, last: Tensor | None, stride: int) -> Scales:
    """Find the scales of blocks, and count the differences of the first of every `stride` tiles.

    Shapes: held and new (n,), last (n,), int8.
    """
    tiles = -(-form.numel(held) // _TILE)
    levels, base = np.empty((tiles, _BLOCKS), np.int32), np.empty(tiles, np.int32)
    counts = np.zeros((1 if last is None else 2, _IDLE, _BINS), np.int32)
    _scales(_patterns(form, held), _patterns(form, new), _lasts(last), stride, *_form(form), levels, base, counts)
    histograms = torch.from_numpy(counts)
    rest = None if last is None else histograms[1]
    return Scales(torch.from_numpy(levels), torch.from_numpy(base), histograms[0], rest)


def write_tiles(
    form: PatternForm, held: Tensor, new: Tensor, last: Tensor | None, found: Scales, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the runs of all tiles: words, (w,), int32, and for each tile the bits of unary numbers and its words.

    Shapes: held and new (n,), last (n,), int8; table (IDLE,), int32 -> (w,), int32, and (t, 2), int64.
    """
    numel = form.numel(held)
    words = np.empty(-(-numel // _TILE) * (_TILE * form.bits // 32), np.uint32)
    sizes = np.empty((len(found.base), 2), np.int64)
    num_words = _write(
        _patterns(form, held), _patterns(form, new), _lasts(last), *_form(form), found.levels.numpy(),
        found.base.numpy(), table.numpy(), words, sizes,
    )  # fmt: skip
    return torch.from_numpy(words[:num_words].view(np.int32)), torch.from_numpy(sizes)


def read_tiles(
    form: PatternForm, held: Tensor, last: Tensor | None, words: Tensor, sizes: Tensor, levels: Tensor, base: Tensor,
    table: Tensor,
) -> tuple[Tensor, bool]:  # fmt: skip
    """Read the new patterns, (n,), int16, and whether all sizes agree. See `write_tiles`; levels (b,), base (t,)."""
    new = torch.empty(form.numel(held), dtype=torch.int16)
    agrees = _read(
        _patterns(form, held), _lasts(last), *_form(form), levels.numpy(), base.numpy(), table.numpy(),
        words.numpy().view(np.uint32), sizes.numpy(), new.numpy(),
    )  # fmt: skip
    return new, bool(agrees)


def moved_ulps(form: PatternForm, held: Tensor, new: Tensor) -> Tensor:
    """See `lossless.last_difference`."""
    last = torch.empty(form.numel(held), dtype=torch.int8)
    _last_difference(_patterns(form, held), _patterns(form, new), *_form(form), last.numpy())
    return last


def _patterns(form: PatternForm, values: Tensor) -> np.ndarray:
    return form.patterns(values).to(torch.int16).numpy()


def _lasts(last: Tensor | None) -> np.ndarray:
    return np.empty(0, np.int8) if last is None else last.numpy()


def _form(form: PatternForm) -> tuple[int, int]:
    return form.bits, -1 if form.mantissa_bits is None else form.mantissa_bits


# -- what both sides know ----------------------------------------------------------------------------------------------


@intrinsic
def _trailing_zeros(_, number):
    """The zeros below the lowest one of a uint64; 64 if there is none."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@_compiled
def _numbers(patterns, bits, mantissa, numbers):
    """The number of each pattern, which is its own reverse, so the pattern of each number."""
    shift, half = np.int32(bits - 1), np.int32((1 << (bits - 1)) - 1 if mantissa >= 0 else 0)
    for i in range(len(patterns)):
        pattern = np.int32(patterns[i])
        numbers[i] = pattern ^ ((pattern >> shift) & half)


@_compiled
def _exponents(patterns, bits, mantissa, exponents):
    """The exponents of a tile's patterns; that of zeros fills it up."""
    if mantissa < 0:
        exponents[:] = 1
        return
    shift, mask = np.int32(mantissa), np.int32((1 << (bits - 1 - mantissa)) - 1)
    for i in range(len(patterns)):
        exponents[i] = max((np.int32(patterns[i]) >> shift) & mask, np.int32(1))
    exponents[len(patterns) :] = 1


@_compiled
def _contexts(exponents, levels, base, last, context):
    """The context of each value of a tile whose blocks have these levels."""
    most = np.int32(_CLASSES - 1)
    for block in range(_BLOCKS):
        of_block = context[block * _BLOCK : (block + 1) * _BLOCK]
        if block >= len(levels) or levels[block] == 0:
            of_block[:] = _IDLE
            continue
        own, scale = exponents[block * _BLOCK : (block + 1) * _BLOCK], np.int32(levels[block] + base)
        for i in range(_BLOCK):
            of_block[i] = min(max(scale - own[i], np.int32(0)), most) * np.int32(_RANKS)
    for i in range(len(last)):
        context[i] = min(context[i] + _RANK[last[i] + 128], np.int32(_IDLE))


@_compiled
def _bit_length(number):
    length = 0
    while number:
        number >>= 1
        length += 1
    return length


@_compiled
def _bin(value):
    size = abs(value)
    if size <= _EXACT_BINS:
        return value + _EXACT_BINS
    return 2 * (_bit_length(size) - _bit_length(_EXACT_BINS)) + (value < 0) + 2 * _EXACT_BINS + 1


@_compiled
def _differences(held, new, last, bits, mantissa, old, moved):
    """The differences of a tile in the direction of the last ones; zeros fill it up."""
    _numbers(held, bits, mantissa, old)
    _numbers(new, bits, mantissa, moved)
    for i in range(len(held)):
        moved[i] -= old[i]
    for i in range(len(last)):
        moved[i] = -moved[i] if last[i] < 0 else moved[i]
    moved[len(held) :] = 0


@_compiled
def _last_difference(held, new, bits, mantissa, last):
    shift, half = np.int32(bits - 1), np.int32((1 << (bits - 1)) - 1 if mantissa >= 0 else 0)
    for i in range(len(held)):
        old, fresh = np.int32(held[i]), np.int32(new[i])
        moved = (fresh ^ ((fresh >> shift) & half)) - (old ^ ((old >> shift) & half))
        last[i] = min(max(moved, np.int32(-127)), np.int32(127))


# -- encode ------------------------------------------------------------------------------------------------------------


@_compiled
def _scales_of_tile(exponents, moved, levels):
    """Find the levels of a tile's blocks; its base."""
    scales, highest = np.empty(_BLOCKS, np.int32), _LOWEST_BASE
    for block in range(_BLOCKS):
        own, of_own = moved[block * _BLOCK : (block + 1) * _BLOCK], exponents[block * _BLOCK : (block + 1) * _BLOCK]
        top, changed, total = np.int32(0), np.int32(0), np.int32(0)
        for i in range(_BLOCK):
            top = max(top, of_own[i])
            changed |= own[i]
        levels[block] = changed != 0
        if changed:
            for i in range(_BLOCK):
                step = (abs(own[i]) << np.int32(_STEP_BITS)) >> min(top - of_own[i], np.int32(30))
                total += min(step, np.int32(_MAX_STEP))
            scales[block] = top - _STEP_BITS + _bit_length(total)
            highest = max(highest, scales[block])
    base = min(max(highest - _MAX_LEVEL, _LOWEST_BASE), _LOWEST_BASE + 255)
    for block in range(_BLOCKS):
        if levels[block]:
            levels[block] = min(max(scales[block] - base, 1), _MAX_LEVEL)
    return base


@_compiled
def _scales(held, new, last, stride, bits, mantissa, levels, base, counts):
    exponents, old, moved = np.empty(_TILE, np.int32), np.empty(_TILE, np.int32), np.empty(_TILE, np.int32)
    context = np.empty(_TILE, np.int32)
    for tile in range(len(base)):
        begin, end = tile * _TILE, min((tile + 1) * _TILE, len(held))
        past = last[begin:end]
        _differences(held[begin:end], new[begin:end], past, bits, mantissa, old, moved)
        _exponents(held[begin:end], bits, mantissa, exponents)
        base[tile] = _scales_of_tile(exponents, moved, levels[tile])
        if tile % stride == 0:
            _contexts(exponents, levels[tile], base[tile], past, context)
            for i in range(end - begin):
                if context[i] < _IDLE:
                    counts[0, context[i], _bin(moved[i])] += 1
                    if len(past):
                        counts[1, context[i], _bin(moved[i] - _PREDICTION[past[i] + 128])] += 1


@_compiled
def _put(words, at, field, width):
    """Write a field of at most 16 bits into words of 64, which are zeros there."""
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= field << shift
    if at & 63 > 64 - width:
        words[word + 1] |= field >> (np.uint64(64) - shift)


@_compiled
def _append(words, at, others, num_bits):
    """Write a run of bits after another one, and make zeros of it; the place after it."""
    shift = np.uint64(at & 63)
    for index in range((num_bits + 63) >> 6):
        word = (at >> 6) + index
        words[word] |= others[index] << shift
        if shift:
            words[word + 1] |= others[index] >> (np.uint64(64) - shift)
        others[index] = 0
    return at + num_bits


@_compiled
def _write(held, new, last, bits, mantissa, levels, base, table, words, sizes):
    exponents, old, moved = np.empty(_TILE, np.int32), np.empty(_TILE, np.int32), np.empty(_TILE, np.int32)
    context, entries = np.empty(_TILE, np.int32), np.empty(_IDLE + 1, np.int32)
    entries[:_IDLE], entries[_IDLE] = table, _NONE
    run, fields = np.zeros(2 * _MOST_WORDS, np.uint64), np.zeros(_MOST_WORDS, np.uint64)
    unaries, events = np.zeros((_SIZES, _MOST_WORDS // 4), np.uint64), np.zeros((_SIZES, _MOST_WORDS), np.uint64)
    # of each size of bucket: the values so far, the bits of unary numbers, of which zeros are counted, and of events
    counts, unary_at, event_at = np.zeros(_SIZES, np.int64), np.zeros(_SIZES, np.int64), np.zeros(_SIZES, np.int64)
    mask, num_words = (1 << bits) - 1, 0
    for tile in range(len(base)):
        begin, end = tile * _TILE, min((tile + 1) * _TILE, len(held))
        if not levels[tile].any():
            sizes[tile, 0] = sizes[tile, 1] = 0
            continue
        past, own = last[begin:end], new[begin:end]
        _differences(held[begin:end], own, past, bits, mantissa, old, moved)
        _exponents(held[begin:end], bits, mantissa, exponents)
        _contexts(exponents, levels[tile], base[tile], past, context)
        run_at, field_at = 0, 0
        for i in range(end - begin):
            entry, value = entries[context[i]], np.int64(moved[i])
            code = entry & _CODE
            if code < _RICE_CODES:
                if entry & _PREDICT and len(past):
                    value -= _PREDICTION[past[i] + 128]
                turned = value if entry & _FLIP else -value
                zigzag = (turned << 1) ^ (turned >> 63)
                quotient = zigzag >> code
                if quotient < _MAX_QUOTIENT:
                    field, width = zigzag & ((1 << code) - 1), code
                else:
                    quotient, field, width = _MAX_QUOTIENT, np.int64(own[i]) & mask, bits
                run_at += quotient
                run[run_at >> 6] |= np.uint64(1) << np.uint64(run_at & 63)
                run_at += 1
                _put(fields, field_at, np.uint64(field), width)
                field_at += width
            elif code != _NONE:
                place = _SIZE_OF_CODE[code]
                rank, m = counts[place], _BITS[place]
                counts[place] = rank + 1
                if value != 0:
                    member = rank & ((1 << m) - 1)
                    for _ in range(min(abs(value), _MAX_EVENTS)):
                        _put(events[place], event_at[place], np.uint64(member << 1 | (value < 0)), m + 1)
                        event_at[place] += m + 1
                        unary_at[place] += 1
                    if abs(value) >= _MAX_EVENTS:
                        _put(fields, field_at, np.uint64(np.int64(own[i]) & mask), bits)
                        field_at += bits
                if (rank + 1) & ((1 << m) - 1) == 0:
                    at = unary_at[place]
                    unaries[place, at >> 6] |= np.uint64(1) << np.uint64(at & 63)
                    unary_at[place] = at + 1
        for place in range(_SIZES):
            if counts[place] & ((1 << _BITS[place]) - 1):  # the last bucket is not full
                at = unary_at[place]
                unaries[place, at >> 6] |= np.uint64(1) << np.uint64(at & 63)
                unary_at[place] = at + 1
            run_at = _append(run, run_at, unaries[place], unary_at[place])
            counts[place] = unary_at[place] = 0
        unary_bits = run_at
        for place in range(_SIZES):
            run_at = _append(run, run_at, events[place], event_at[place])
            event_at[place] = 0
        run_at = _append(run, run_at, fields, field_at)
        own_words, raw_words = (run_at + 31) >> 5, ((end - begin) * bits + 31) >> 5
        if own_words >= raw_words and unary_bits > 0:
            run[: (run_at + 63) >> 6] = 0
            own_words, unary_bits = raw_words, 0
            for i in range(end - begin):
                _put(run, i * bits, np.uint64(np.int64(own[i]) & mask), bits)
        for word in range(own_words):
            words[num_words + word] = np.uint32(run[word >> 1] >> np.uint64(32 * (word & 1)))
        run[: (max(run_at, 32 * own_words) + 63) >> 6] = 0
        num_words += own_words
        sizes[tile, 0], sizes[tile, 1] = unary_bits, own_words
    return num_words


# -- decode ------------------------------------------------------------------------------------------------------------


@_compiled
def _bits_from(run, at):
    """The bits of a run from a place on, at least 33 of them, in a word of 64; zeros beyond its end."""
    word = at >> 5
    low = np.uint64(run[word]) if word < len(run) else np.uint64(0)
    high = np.uint64(run[word + 1]) if word + 1 < len(run) else np.uint64(0)
    return (low | (high << np.uint64(32))) >> np.uint64(at & 31)


@_compiled
def _next_one(run, at, limit):
    """The place of the next one of a run, or `limit` if there is none before."""
    while at < limit:
        bits = _bits_from(run, at)
        if bits:
            return min(at + np.int64(_trailing_zeros(bits)), limit)
        at += 33
    return limit


@_compiled
def _read_quotients(run, num, limit, quotients):
    """Read the unary numbers of Rice codes; the place after them, or -1 if they are too few."""
    at = 0
    bits, known = np.uint64(0), 0  # what is ahead, in a register
    for index in range(num):
        if known < 24:
            bits, known = _bits_from(run, at), 33
        zeros = np.int64(_trailing_zeros(bits))
        if zeros < known:
            bits >>= np.uint64(zeros + 1)
            known -= zeros + 1
        else:
            zeros, known = _next_one(run, at, limit) - at, 0
        quotients[index] = min(zeros, _MAX_QUOTIENT)
        at += zeros + 1
        if at > limit:
            return -1
    return at


@_compiled
def _read_events(run, at, event_at, limit, m, members, moved, codes):
    """Add the events of the buckets of one size to their values; the places after both, or -1 if they do not fit."""
    for cell in range((len(members) + (1 << m) - 1) >> m):
        one = _next_one(run, at, limit)
        if one >= limit or event_at + (one - at) * (m + 1) > 32 * len(run):
            return -1, -1
        for _ in range(one - at):
            field = np.int64(_bits_from(run, event_at)) & ((1 << (m + 1)) - 1)
            event_at += m + 1
            rank = (cell << m) + (field >> 1)
            if rank >= len(members):
                return -1, -1
            moved[members[rank]] += 1 - 2 * (field & 1)
            if abs(moved[members[rank]]) == _MAX_EVENTS:
                codes[members[rank]] = _RAW
        at = one + 1
    return at, event_at


@_compiled
def _read(held, last, bits, mantissa, levels, base, table, words, sizes, new):
    exponents, numbers, context = np.empty(_TILE, np.int32), np.empty(_TILE, np.int32), np.empty(_TILE, np.int32)
    entries, codes, moved = np.empty(_IDLE + 1, np.int32), np.empty(_TILE, np.int32), np.empty(_TILE, np.int32)
    entries[:_IDLE], entries[_IDLE] = table, _NONE
    quotients, members = np.empty(_TILE, np.int32), np.empty((_SIZES, _TILE), np.int32)
    counts, escaped = np.empty(_SIZES, np.int64), np.empty((2, _TILE), np.int32)
    mask, first_word = (1 << bits) - 1, 0
    for tile in range(len(base)):
        begin, end = tile * _TILE, min((tile + 1) * _TILE, len(held))
        unary_bits, num_words = sizes[tile, 0], sizes[tile, 1]
        run, out, past = words[first_word : first_word + num_words], new[begin:end], last[begin:end]
        first_word += num_words
        own_levels = levels[tile * _BLOCKS : (tile + 1) * _BLOCKS]
        if len(run) < num_words or unary_bits > 32 * num_words:
            return False
        if unary_bits == 0:  # nothing, or patterns
            if num_words != (((end - begin) * bits + 31) >> 5 if num_words else 0):
                return False
            if num_words == 0 and own_levels.any():
                return False
            for i in range(end - begin):
                out[i] = np.int64(_bits_from(run, i * bits)) & mask if num_words else held[begin + i]
            continue
        _numbers(held[begin:end], bits, mantissa, numbers)
        _exponents(held[begin:end], bits, mantissa, exponents)
        _contexts(exponents, own_levels, base[tile], past, context)
        for i in range(_TILE):
            codes[i], moved[i] = entries[context[i]], 0
        num_rice, num_escaped = 0, 0
        counts[:] = 0
        for i in range(end - begin):
            code = codes[i] & _CODE
            num_rice += code < _RICE_CODES
            place = _SIZE_OF_CODE[code]
            if place >= 0:
                members[place, counts[place]] = i
                counts[place] += 1
        at, event_at = _read_quotients(run, num_rice, unary_bits, quotients), unary_bits
        for place in range(_SIZES):
            if counts[place] and at >= 0:
                own = members[place, : counts[place]]
                at, event_at = _read_events(run, at, event_at, unary_bits, _BITS[place], own, moved, codes)
        if at != unary_bits:
            return False
        at, num_rice = event_at, 0
        for i in range(end - begin):
            entry = codes[i]
            code = entry & _CODE
            if code < _RICE_CODES:
                quotient = np.int64(quotients[num_rice])
                num_rice += 1
                if quotient < _MAX_QUOTIENT:
                    zigzag = (quotient << code) | (np.int64(_bits_from(run, at)) & ((1 << code) - 1))
                    at += code
                    value = (zigzag >> 1) ^ -(zigzag & 1)
                    if not entry & _FLIP:
                        value = -value
                    if entry & _PREDICT and len(past):
                        value += _PREDICTION[past[i] + 128]
                    moved[i] = value
                    continue
            elif code != _RAW:
                continue
            escaped[0, num_escaped], escaped[1, num_escaped] = i, np.int64(_bits_from(run, at)) & mask
            num_escaped += 1
            at += bits
        if (at + 31) >> 5 != num_words:
            return False
        for i in range(len(past)):
            moved[i] = -moved[i] if past[i] < 0 else moved[i]
        for i in range(end - begin):
            numbers[i] += moved[i]
        _numbers(numbers[: end - begin], bits, mantissa, out)
        for index in range(num_escaped):
            out[escaped[0, index]] = escaped[1, index]
    return True
