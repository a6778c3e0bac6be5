"""The oracle of lossless differences: patterns as Python's whole numbers, one value at a time, runs of bits as strings.

The format is that of [Note: Lossless differences] and [Note: Codes that decode in parallel] in codec/lossless.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import isqrt
from typing import NamedTuple

BLOCK, TILE = 512, 4096
RICE, BUCKETS = range(14), (1, 2, 3, 4, 6, 8, 10)
MAX_QUOTIENT, MAX_EVENTS, RARE, CLASSES = 16, 4, 16, 24


class Form(NamedTuple):
    """The bits of a pattern, and of its mantissa, which is None for whole numbers without sign."""

    bits: int
    mantissa_bits: int | None


FORMS = {
    "bfloat16": Form(16, 7), "float16": Form(16, 10), "float8_e4m3fn": Form(8, 3), "float8_e5m2": Form(8, 2),
    "uint8": Form(8, None), "e2m1": Form(4, 1),
}  # fmt: skip


def number(form: Form, pattern: int) -> int:
    """The place of a pattern in the order of values."""
    half = 1 << (form.bits - 1)
    if form.mantissa_bits is None or pattern < half:
        return pattern
    return -1 - (pattern - half)


def exponent(form: Form, pattern: int) -> int:
    """The biased exponent; that of denormals is 1."""
    if form.mantissa_bits is None:
        return 1
    return max(1, pattern % (1 << (form.bits - 1)) >> form.mantissa_bits)


def differences(form: Form, held: Sequence[int], new: Sequence[int]) -> list[int]:
    """The ulps of each value, at most 127."""
    moved = [number(form, b) - number(form, a) for a, b in zip(held, new, strict=True)]
    return [max(-127, min(127, each)) for each in moved]


class Known(NamedTuple):
    """The facts about a value that both sides know before it is coded."""

    context: tuple[int, int] | None
    """Its class and rank; None in a block that has not changed."""
    sign: int
    prediction: int


def _known(form: Form, held: int, last: int | None, level: int, base: int) -> Known:
    last = last or 0
    size = abs(last)
    rank = size if size <= 2 else min(7, size.bit_length() + 1)
    step = max(0, min(23, level + base - exponent(form, held)))
    return Known((step, rank) if level else None, -1 if last < 0 else 1, (230 * size + 128) // 256)


def _all_known(
    form: Form, held: Sequence[int], last: Sequence[int] | None, levels: list[int], bases: list[int]
) -> list[Known]:
    lasts: Sequence[int | None] = [None] * len(held) if last is None else last
    return [_known(form, held[i], lasts[i], levels[i // BLOCK], bases[i // TILE]) for i in range(len(held))]


def _scales(form: Form, held: Sequence[int], moved: list[int]) -> tuple[list[int], list[int]]:
    """The level of each block, and the base of each tile."""
    scales: list[int | None] = []
    for begin in range(0, len(held), BLOCK):
        block = range(begin, min(begin + BLOCK, len(held)))
        # the patterns that fill up the last tile are zeros, whose exponent is the smallest
        top = max(exponent(form, held[i]) for i in block)
        total = 0
        for i in block:
            step = (abs(moved[i]) << 12) >> min(30, top - exponent(form, held[i]))
            total += min(step, (1 << 15) - 1)
        scales.append(top - 12 + total.bit_length() if any(moved[i] for i in block) else None)
    levels, bases = [], []
    for begin in range(0, len(scales), TILE // BLOCK):
        own = scales[begin : begin + TILE // BLOCK]
        base = max([0, *(scale for scale in own if scale is not None)]) - 15
        bases.append(base := min(240, base))
        levels += [0 if scale is None else max(1, min(15, scale - base)) for scale in own]
    return levels, bases


class Entry(NamedTuple):
    """A code: ("rice", k), ("bucket", m), or of all values of a tile ("raw", 0)."""

    kind: str
    bits: int
    flips: bool = False
    predicts: bool = False

    @property
    def byte(self) -> int:
        """The entry in the table."""
        code = {"rice": 0, "bucket": 16}[self.kind] + self.bits
        return code + 32 * self.flips + 64 * self.predicts


ENTRIES = [
    *(Entry("rice", k, flips) for flips in (False, True) for k in RICE),
    *(Entry("bucket", m) for m in BUCKETS),
]
PREDICTING = [Entry("rice", k, flips, True) for flips in (False, True) for k in RICE]


def _default(context: tuple[int, int]) -> Entry:
    step, rank = context
    if step < 8:
        return Entry("bucket", (10, 8, 6, 6, 4, 4, 3, 2)[step])
    return Entry("rice", max(0, min(13, step - 9)), False, rank > 1)


def zigzag(value: int) -> int:
    """0, 1, -1, 2, -2, ... as 0, 1, 2, 3, 4, ..."""
    return 2 * value - 1 if value > 0 else -2 * value


@cache
def _cost(form: Form, entry: Entry, value: int) -> Fraction:
    """The bits of a value, of which those beyond 16 count as one amid those of as many bits."""
    if abs(value) > 16:
        size = 3 << (abs(value).bit_length() - 2)
        value = size if value > 0 else -size
    if entry.kind == "rice":
        quotient = zigzag(-value if entry.flips else value) >> entry.bits
        return Fraction(quotient + 1 + entry.bits if quotient < MAX_QUOTIENT else MAX_QUOTIENT + 1 + form.bits)
    events = min(MAX_EVENTS, abs(value))
    escape = form.bits if events == MAX_EVENTS else 0
    return Fraction(1, 2**entry.bits) + events * (entry.bits + 2) + escape


def _bits_of(form: Form, entry: Entry, values: Counter[int]) -> Fraction:
    return sum((_cost(form, entry, value) * count for value, count in values.items()), Fraction(0))


def _choose(form: Form, known: list[Known], moved: list[int], has_last: bool) -> dict[tuple[int, int], Entry]:
    """The entries of contexts that are not the default, by a sample of the tiles."""
    plain: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    rests: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    stride = (isqrt(-(-len(known) // TILE)) + 1) // 2
    for i, (own, difference) in enumerate(zip(known, moved, strict=True)):
        if own.context is not None and i // TILE % stride == 0:
            plain[own.context][difference * own.sign] += 1
            rests[own.context][difference * own.sign - own.prediction] += 1
    table = {}
    for context, values in plain.items():
        if values.total() >= RARE:
            costs = [(_bits_of(form, entry, values), entry) for entry in ENTRIES]
            if has_last:
                costs += [(_bits_of(form, entry, rests[context]), entry) for entry in PREDICTING]
            best = min(costs, key=lambda pair: pair[0])[1]  # the first of the best
            if best != _default(context):
                table[context] = best
    return table


def _field(value: int, width: int) -> str:
    """The bits of a number, the lowest first."""
    return "".join(str(value >> place & 1) for place in range(width))


def _words(bits: str) -> bytes:
    filled = bits + "0" * (-len(bits) % 32)
    return bytes(int(filled[begin : begin + 8][::-1], 2) for begin in range(0, len(filled), 8))


class Tile(NamedTuple):
    """The values of a tile by code: their places."""

    entries: dict[int, Entry]
    buckets: list[list[int]]
    """Neighbours of one size of bucket that share a unary number, by size."""


def _tile(known: list[Known], table: dict[tuple[int, int], Entry], begin: int) -> Tile:
    entries = {
        i: table.get(context) or _default(context)
        for i in range(begin, min(begin + TILE, len(known)))
        if (context := known[i].context) is not None
    }
    buckets = []
    for m in BUCKETS:
        own = [i for i, entry in entries.items() if entry.kind == "bucket" and entry.bits == m]
        buckets += [own[first : first + 2**m] for first in range(0, len(own), 2**m)]
    return Tile(entries, buckets)


def _encode_tile(
    form: Form, tile: Tile, known: list[Known], moved: list[int], new: Sequence[int], begin: int
) -> tuple[int, bytes]:
    """The bits of the unary run, and the words of a tile."""
    unary, fields, of_events = "", "", ""
    for i, entry in tile.entries.items():
        if entry.kind == "rice":
            value = moved[i] * known[i].sign - known[i].prediction * entry.predicts
            rest = zigzag(-value if entry.flips else value)
            quotient = min(MAX_QUOTIENT, rest >> entry.bits)
            unary += "0" * quotient + "1"
            fields += _field(new[i], form.bits) if quotient == MAX_QUOTIENT else _field(rest, entry.bits)
        elif abs(moved[i]) >= MAX_EVENTS:
            fields += _field(new[i], form.bits)
    for bucket in tile.buckets:
        m, count = tile.entries[bucket[0]].bits, 0
        for place, i in enumerate(bucket):
            events = min(MAX_EVENTS, abs(moved[i]))
            of_events += (_field(moved[i] * known[i].sign < 0, 1) + _field(place, m)) * events
            count += events
        unary += "0" * count + "1"
    words = _words(unary + of_events + fields)
    raw = _words("".join(_field(pattern, form.bits) for pattern in new[begin : begin + TILE]))
    return (len(unary), words) if len(words) < len(raw) or not unary else (0, raw)


def encoded(form: Form, held: Sequence[int], new: Sequence[int], last: Sequence[int] | None) -> bytes:
    """The payload of these patterns."""
    raw = b"".join(each.to_bytes(form.bits // 8, "little") for each in new) if form.bits > 4 else bytes(
        low | high << 4 for low, high in zip(new[::2], new[1::2], strict=True)
    )  # fmt: skip
    moved = [number(form, b) - number(form, a) for a, b in zip(held, new, strict=True)]
    levels, bases = _scales(form, held, moved)
    known = _all_known(form, held, last, levels, bases)
    table = _choose(form, known, moved, last is not None)
    tiles = [
        _encode_tile(form, _tile(known, table, begin), known, moved, new, begin) for begin in range(0, len(held), TILE)
    ]
    head = b"".join(
        number.to_bytes(2, "little") for unary_bits, words in tiles for number in (unary_bits, len(words) // 4)
    )
    head += bytes(base + 15 for base in bases)
    head += bytes(low | high << 4 for low, high in zip(levels[::2], [*levels[1::2], 0], strict=False))
    sent = sum(1 << 8 * step + rank for step, rank in table)
    head += sent.to_bytes(CLASSES, "little") + bytes(table[context].byte for context in sorted(table))
    head += b"\0" * (-len(head) % 4)
    payload = head + b"".join(words for _, words in tiles)
    return payload if len(payload) < len(raw) else raw
