"""Runs of bits on a CPU, for loops that numba compiles: written and read where the last field has ended.

numba widens whole numbers to int64, and a loop on int64 has half the lanes of a loop on int32. What it cannot say, or
only so, is one instruction of LLVM here.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# numba types the functions that it compiles

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from laconic.codec.loops import compiled

LANES = 64
"""The octets that `where` compares."""
SPARE = 4
"""The places behind the last one that `list_ones` may write to, and the words behind a run that `window` may read."""

_compiled = compiled()


# -- instructions ------------------------------------------------------------------------------------------------------


@intrinsic
def trailing_zeros(_, number):
    """The zeros below the lowest one of a uint64; 64 if there is none."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@intrinsic
def leading_zeros(_, number):
    """The zeros above the highest one of an int32; 32 if there is none."""

    def generate(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int32(types.int32), generate


@intrinsic
def num_ones(_, number):
    """The ones of a uint64."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def right(_, number, by):
    """An int32, shifted to the right by the lowest five bits of another one."""

    def generate(context, builder, signature, args):
        return builder.ashr(args[0], builder.and_(args[1], ir.Constant(ir.IntType(32), 31)))

    return types.int32(types.int32, types.int32), generate


@intrinsic
def where(_, octets, begin, octet):
    """A bit for each of LANES octets of an array, from a place on, in a uint64: whether it is this one."""
    lanes = ir.VectorType(ir.IntType(8), LANES)
    first = ir.Constant(ir.IntType(32), 0)

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        own = builder.load(builder.bitcast(builder.gep(data, [args[1]]), lanes.as_pointer()), align=1)
        undefined = ir.Constant(lanes, ir.Undefined)
        single = builder.insert_element(undefined, args[2], first)
        alike = builder.shuffle_vector(
            single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        )
        return builder.bitcast(builder.icmp_unsigned("==", own, alike), ir.IntType(LANES))

    return types.uint64(octets, types.int64, types.uint8), generate


# -- write -------------------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """The end of a run that is being written, in registers: uint64 each."""

    word: int
    """The number of words that are full."""
    part: int
    """The bits of the next one."""
    used: int
    """How many they are, below 64."""


@_compiled
def start():
    """The end of an empty run."""
    return End(np.uint64(0), np.uint64(0), np.uint64(0))


@_compiled
def put_field(run, end, field, width):
    """Write a field of at most 64 bits at the end of a run; its new end. No branch: widths cannot be foreseen."""
    part = end.part | (field << end.used)
    run[end.word] = part
    beyond = (field >> np.uint64(1)) >> (np.uint64(63) - end.used)
    bits = end.used + width
    is_full = bits >> np.uint64(6)
    return End(end.word + is_full, beyond if is_full else part, bits & np.uint64(63))


@_compiled
def put_all(run, end, fields, widths):
    """Write fields of at most 64 bits; the new end."""
    for i in range(len(fields)):
        end = put_field(run, end, fields[i], np.uint64(widths[i]))
    return end


@_compiled
def put_run(run, end, others, num_bits, flips):
    """Write the bits of a run at the end of another, turned over by `flips`, and make zeros of it; the new end."""
    for index in range((num_bits + 63) >> 6):
        width = np.uint64(min(num_bits - 64 * index, 64))
        field = (others[index] ^ flips) & (~np.uint64(0) >> (np.uint64(64) - width))
        end = put_field(run, end, field, width)
        others[index] = 0
    return end


@_compiled
def insert(run, at, field, width):
    """Write a field of at most 16 bits into a run that has zeros there."""
    word, shift = at >> 6, np.uint64(at & 63)
    run[word] |= field << shift
    if at & 63 > 64 - width:
        run[word + 1] |= field >> (np.uint64(64) - shift)


# -- read --------------------------------------------------------------------------------------------------------------


@_compiled
def window(words, at):
    """The bits of words of 32 from a place on, a uint64, at least 33 of them, in a word of 64."""
    word = at >> np.uint64(5)
    low, high = np.uint64(words[word]), np.uint64(words[word + np.uint64(1)])
    return (low | (high << np.uint64(32))) >> (at & np.uint64(31))


@_compiled
def list_ones(bits, first, places, num):
    """Add the places of a word's ones, counted from `first`, to `num` that are listed; how many are listed then.

    Four are written at once, of which the last may be none: their number cannot be foreseen.
    """
    until = num + num_ones(bits)
    while num < until:
        for lane in range(4):
            places[num + np.uint64(lane)] = first + np.int64(trailing_zeros(bits))
            bits &= bits - np.uint64(1)
        num += np.uint64(4)
    return until


@_compiled
def list_octets(octets, octet, flips, places):
    """List the places of the octets that are equal to this one, or with ~0 in `flips` of all others; their number."""
    num = np.uint64(0)
    for first in range(0, len(octets), LANES):
        num = list_ones(where(octets, first, octet) ^ flips, first, places, num)
    return np.int64(num)
