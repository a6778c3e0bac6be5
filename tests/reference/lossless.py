"""The oracle of lossless differences: patterns as Python's whole numbers, one value at a time, runs of bits as strings.

The format is that of [Note: Lossless differences] and [Note: Codes that decode in parallel] in codec/lossless.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

BLOCK, TILE = 512, 4096
BUCKETS = (1, 2, 3, 4, 6, 8, 10)
MAX_QUOTIENT, MAX_EVENTS, CLASSES = 16, 4, 24


class Form(NamedTuple):
    """The bits of a pattern, and of its mantissa, which is None for whole numbers without sign."""

    bits: int
    mantissa_bits: int | None


FORMS = {
    "bfloat16": Form(16, 7), "float16": Form(16, 10), "float8_e4m3fn": Form(8, 3), "float8_e5m2": Form(8, 2),
    "uint8": Form(8, None),
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


def contexts(form: Form, held: Sequence[int], levels: Sequence[int], bases: Sequence[int]) -> list[int | None]:
    """The context of each value, which both sides know before it is coded; None in a block that has not changed."""
    found: list[int | None] = []
    for i, pattern in enumerate(held):
        step = levels[i // BLOCK] + bases[i // TILE] - exponent(form, pattern)
        found.append(max(0, min(CLASSES - 1, step)) if levels[i // BLOCK] else None)
    return found


def scales(form: Form, held: Sequence[int], moved: list[int]) -> tuple[list[int], list[int]]:
    """The level of each block, and the base of each tile."""
    found: list[int | None] = []
    for begin in range(0, len(held), BLOCK):
        block = range(begin, min(begin + BLOCK, len(held)))
        # the patterns that fill up the last tile are zeros, whose exponent is the smallest
        top = max(exponent(form, held[i]) for i in block)
        total = 0
        for i in block:
            step = (abs(moved[i]) << 12) >> min(30, top - exponent(form, held[i]))
            total += min(step, (1 << 15) - 1)
        found.append(top - 12 + total.bit_length() if any(moved[i] for i in block) else None)
    levels, bases = [], []
    for begin in range(0, len(found), TILE // BLOCK):
        own = found[begin : begin + TILE // BLOCK]
        base = max([0, *(scale for scale in own if scale is not None)]) - 15
        bases.append(base := min(240, base))
        levels += [0 if scale is None else max(1, min(15, scale - base)) for scale in own]
    return levels, bases


class Entry(NamedTuple):
    """A code: ("rice", k), ("bucket", m), or of all values of a tile ("raw", 0)."""

    kind: str
    bits: int
    flips: bool = False

    @property
    def byte(self) -> int:
        """The entry in the table."""
        code = {"rice": 0, "bucket": 16}[self.kind] + self.bits
        return code + 32 * self.flips


def code_of(context: int) -> Entry:
    """The code of a context that a payload does not name."""
    if context < 8:
        return Entry("bucket", (10, 8, 6, 6, 4, 4, 3, 2)[context])
    return Entry("rice", max(0, min(13, context - 9)))


def zigzag(value: int) -> int:
    """0, 1, -1, 2, -2, ... as 0, 1, 2, 3, 4, ..."""
    return 2 * value - 1 if value > 0 else -2 * value


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


def _tile(known: Sequence[int | None], table: Mapping[int, Entry], begin: int) -> Tile:
    entries = {
        i: table.get(context) or code_of(context)
        for i in range(begin, min(begin + TILE, len(known)))
        if (context := known[i]) is not None
    }
    buckets = []
    for m in BUCKETS:
        own = [i for i, entry in entries.items() if entry.kind == "bucket" and entry.bits == m]
        buckets += [own[first : first + 2**m] for first in range(0, len(own), 2**m)]
    return Tile(entries, buckets)


def _encode_tile(form: Form, tile: Tile, moved: Sequence[int], new: Sequence[int], begin: int) -> tuple[int, bytes]:
    """The bits of the unary run, and the words of a tile."""
    unary, fields, of_events = "", "", ""
    for i, entry in tile.entries.items():
        if entry.kind == "rice":
            rest = zigzag(-moved[i] if entry.flips else moved[i])
            quotient = min(MAX_QUOTIENT, rest >> entry.bits)
            unary += "0" * quotient + "1"
            fields += _field(new[i], form.bits) if quotient == MAX_QUOTIENT else _field(rest, entry.bits)
        elif abs(moved[i]) >= MAX_EVENTS:
            fields += _field(new[i], form.bits)
    for bucket in tile.buckets:
        m, count = tile.entries[bucket[0]].bits, 0
        for place, i in enumerate(bucket):
            events = min(MAX_EVENTS, abs(moved[i]))
            of_events += (_field(moved[i] < 0, 1) + _field(place, m)) * events
            count += events
        unary += "0" * count + "1"
    words = _words(unary + of_events + fields)
    raw = _words("".join(_field(pattern, form.bits) for pattern in new[begin : begin + TILE]))
    return (len(unary), words) if len(words) < len(raw) or not unary else (0, raw)


def encoded(form: Form, held: Sequence[int], new: Sequence[int], table: Mapping[int, Entry] | None = None) -> bytes:
    """The payload of these patterns, which names the codes of a table, by context."""
    table = table or {}
    raw = b"".join(each.to_bytes(form.bits // 8, "little") for each in new)
    moved = [number(form, b) - number(form, a) for a, b in zip(held, new, strict=True)]
    levels, bases = scales(form, held, moved)
    known = contexts(form, held, levels, bases)
    tiles = [_encode_tile(form, _tile(known, table, begin), moved, new, begin) for begin in range(0, len(held), TILE)]
    head = b"".join(
        number.to_bytes(2, "little") for unary_bits, words in tiles for number in (unary_bits, len(words) // 4)
    )
    head += bytes(base + 15 for base in bases)
    head += bytes(low | high << 4 for low, high in zip(levels[::2], [*levels[1::2], 0], strict=False))
    head += bytes(context in table for context in range(CLASSES))
    head += bytes(table[context].byte for context in sorted(table))
    head += b"\0" * (-len(head) % 4)
    payload = head + b"".join(words for _, words in tiles)
    return payload if len(payload) < len(raw) else raw
