"""Scales, contexts and the choice of codes on a CPU, compiled by numba: the twin of codec/contexts.py, tile by tile.

Work that needs no order is a loop of its own over a tile, in int32: the compiler turns that into vector instructions.
numba widens sums and products to int64, so each step of these says that it is an int32.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# numba types the functions that it compiles

from __future__ import annotations

import inspect

import numpy as np
import torch

from laconic.codec import bits_numba, contexts
from laconic.codec.bits_numba import leading_zeros, right
from laconic.codec.fused import kept
from laconic.codec.loops import compiled

TILE, BLOCK, BLOCKS = contexts.TILE, contexts.BLOCK, contexts.TILE // contexts.BLOCK
IDLE, PREDICT, NONE, BINS = contexts.IDLE, contexts.PREDICT, contexts.NONE, contexts.BINS
_CLASSES, _RANKS, _RARE, _RICE_CODES = contexts.CLASSES, contexts.RANKS, contexts.RARE, contexts.RICE_CODES
_LOWEST_BASE, _MAX_LEVEL = contexts.LOWEST_BASE, contexts.MAX_LEVEL
_STEP_BITS, _MAX_STEP, _EXACT_BINS = contexts.STEP_BITS, contexts.MAX_STEP, contexts.EXACT_BINS
_EXACT_ZEROS = 32 - contexts.EXACT_BINS.bit_length()

CONSTANTS = repr(
    [(name, value) for name, value in sorted(vars(contexts).items()) if isinstance(value, int | tuple)]
).encode()
_compiled = compiled(CONSTANTS, inspect.getsource(bits_numba).encode())


@kept
def options(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries to choose from, (o,), their costs by bin, (BINS, o), and the defaults of rare contexts, (IDLE,)."""
    cpu = torch.device("cpu")
    entries, costs = contexts.options_of(bits, cpu)
    defaults = contexts.defaults(cpu).numpy().astype(np.uint8)
    return entries.numpy().astype(np.uint8), costs.numpy().astype(np.int64), defaults


# -- what both sides know ----------------------------------------------------------------------------------------------


@_compiled
def signs(bits, mantissa):
    """The place of a pattern's sign, and the bits that a sign turns over: `PatternForm.numbers`."""
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
def _rank(last):
    """The rank of a last difference: `contexts.past_tables`."""
    size = np.int32(abs(np.int32(last)))
    return size if size <= 2 else min(np.int32(33 - leading_zeros(size)), np.int32(_RANKS - 1))


@_compiled
def prediction(last):
    """The difference to expect, in the direction of the last one: `contexts.past_tables`."""
    return np.int32(np.int32(np.int32(230 * np.int32(abs(np.int32(last)))) + 128) >> 8)


@_compiled
def turned(moved, last):
    """A difference, in the direction of the last one if it is in that of numbers, and the reverse."""
    sign = np.int32(np.int32(last) >> 31)
    return np.int32((moved ^ sign) - sign)


@_compiled
def find_contexts(exponents, levels, base, last, num, context):
    """The context of each of the `num` values of a tile whose blocks have these levels; idle ones fill it up."""
    most = np.int32(_CLASSES - 1)
    for block in range(BLOCKS):
        of_block = context[block * BLOCK : (block + 1) * BLOCK]
        if levels[block] == 0:
            of_block[:] = IDLE
            continue
        own, scale = exponents[block * BLOCK : (block + 1) * BLOCK], np.int32(levels[block] + base)
        for i in range(BLOCK):
            of_block[i] = min(max(np.int32(scale - own[i]), np.int32(0)), most) * _RANKS
    for i in range(len(last)):
        context[i] = min(context[i] + _rank(last[i]), IDLE)
    context[num:] = IDLE


@_compiled
def look_up(context, table, has_last, entries):
    """The entry of each value of a tile by its context. Idle values have NONE."""
    if has_last:
        whole = np.empty(IDLE + 1, np.uint8)
        whole[:IDLE], whole[IDLE] = table, NONE
        for i in range(TILE):
            entries[i] = whole[np.uint64(context[i])]
        return
    lowest, highest = np.uint8(IDLE), np.uint8(0)
    for i in range(TILE):
        lowest = min(lowest, context[i])
        highest = max(highest, context[i] if context[i] < IDLE else np.uint8(0))
    for i in range(TILE):
        entries[i] = np.uint8(NONE) if context[i] == IDLE else np.uint8(0)
    for each in range(lowest, highest + 1, _RANKS):  # some ten classes: to compare all with each takes less time
        own, entry = np.uint8(each), table[each]
        for i in range(TILE):
            entries[i] |= entry if context[i] == own else np.uint8(0)


@_compiled
def find_differences(held, new, last, bits, mantissa, moved):
    """The differences of a tile in the direction of the last ones; zeros fill it up."""
    sign, half = signs(bits, mantissa)
    for i in range(len(held)):
        old, fresh = np.int32(held[i]), np.int32(new[i])
        moved[i] = number(fresh, sign, half) - number(old, sign, half)
    for i in range(len(last)):
        moved[i] = turned(moved[i], last[i])
    moved[len(held) :] = 0


@_compiled
def write_last_difference(held, new, bits, mantissa, last):
    """See `lossless.last_difference`."""
    sign, half = signs(bits, mantissa)
    for i in range(len(held)):
        old, fresh = np.int32(held[i]), np.int32(new[i])
        moved = np.int32(number(fresh, sign, half) - number(old, sign, half))
        last[i] = min(max(moved, np.int32(-127)), np.int32(127))


# -- what the sender chooses -------------------------------------------------------------------------------------------


@_compiled
def _scales_of_tile(exponents, moved, levels):
    """Find the levels of a tile's blocks; its base."""
    scales, highest = np.empty(BLOCKS, np.int32), _LOWEST_BASE
    for block in range(BLOCKS):
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
    for block in range(BLOCKS):
        if levels[block]:
            levels[block] = min(max(scales[block] - base, 1), _MAX_LEVEL)
    return base


@_compiled
def _count(context, values, cells, counts):
    """Count the values of each context by bin: `contexts.histogram_of`. `cells` has room for a number of each value."""
    for i in range(TILE):
        value, size = values[i], np.int32(abs(values[i]))
        large = np.int32(2 * (_EXACT_ZEROS - leading_zeros(size)) + 2 * _EXACT_BINS + 1)
        own_bin = np.int32(value + _EXACT_BINS) if size <= _EXACT_BINS else np.int32(large + (value < 0))
        cells[i] = np.int32(context[i] * BINS) + own_bin
    for i in range(TILE):
        counts[np.uint64(cells[i])] += 1


@_compiled
def _predict_all(last, moved):
    """Take predictions off all differences of a tile."""
    for i in range(len(last)):
        moved[i] = np.int32(moved[i] - prediction(last[i]))


@_compiled
def find_scales(held, new, last, stride, bits, mantissa, levels, base, counts):
    """Find the scales of blocks, and count the differences of the first of every `stride` tiles by context and bin.

    With last differences, count the remainders after prediction, too.
    """
    exponents, context = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    moved, cells = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    for tile in range(len(base)):
        begin, end = tile * TILE, min((tile + 1) * TILE, len(held))
        past, own_levels = last[begin:end], levels[tile * BLOCKS : (tile + 1) * BLOCKS]
        find_differences(held[begin:end], new[begin:end], past, bits, mantissa, moved)
        find_exponents(held[begin:end], bits, mantissa, exponents)
        base[tile] = _scales_of_tile(exponents, moved, own_levels)
        if tile % stride == 0:
            find_contexts(exponents, own_levels, base[tile], past, end - begin, context)
            _count(context, moved, cells, counts[0])
            if len(past):
                _predict_all(past, moved)
                _count(context, moved, cells, counts[1])


@_compiled
def choose_entries(counts, entries, costs, defaults, table):
    """Choose the entry of each context that takes the fewest bits: `contexts.best_codes`."""
    bits = np.empty(len(entries), np.int64)
    for context in range(IDLE):
        table[context], fewest = defaults[context], np.int64(1) << 62
        first = context * BINS
        if counts[0, first : first + BINS].sum() < _RARE:
            continue
        for kind in range(len(counts)):
            bits[:] = 0
            for each in range(BINS):
                times = np.int64(counts[kind, first + each])
                if times:
                    for option in range(len(entries)):
                        bits[option] += times * costs[each, option]
            for option in range(2 * _RICE_CODES if kind else len(entries)):
                if bits[option] < fewest:
                    fewest, table[context] = bits[option], entries[option] | (PREDICT if kind else 0)
