"""The oracle of lossless differences: patterns as Python's whole numbers, one value at a time, runs of bits as strings.

The format is that of [Note: Lossless differences] and [Note: Codes that decode in parallel] in codec/lossless.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

BLOCK, TILE = 512, 8192
RICE, BUCKETS = range(14), range(1, 13)
MAX_QUOTIENT, MAX_EVENTS, RARE = 16, 4, 16


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


def pattern_of(form: Form, place: int) -> int:
    """The reverse of `number`."""
    return place if place >= 0 else (1 << (form.bits - 1)) + (-1 - place)


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
    form: Form, held: Sequence[int], last: Sequence[int] | None, levels: list[int], base: int
) -> list[Known]:
    lasts: Sequence[int | None] = [None] * len(held) if last is None else last
    return [_known(form, held[i], lasts[i], levels[i // BLOCK], base) for i in range(len(held))]


def _scales(form: Form, held: Sequence[int], moved: list[int]) -> tuple[list[int], int]:
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
    base = max([-15, *(scale for scale in scales if scale is not None)]) - 15
    return [0 if scale is None else max(1, min(15, scale - base)) for scale in scales], base


class Entry(NamedTuple):
    """A code: ("rice", k), ("raw", 0), ("none", 0) or ("bucket", m)."""

    kind: str
    bits: int
    flips: bool = False
    predicts: bool = False

    @property
    def byte(self) -> int:
        """The entry in the table."""
        code = {"rice": 0, "raw": 14, "none": 15, "bucket": 16}[self.kind] + self.bits
        return code + 32 * self.flips + 64 * self.predicts


ENTRIES = [
    *(Entry("rice", k, flips) for flips in (False, True) for k in RICE),
    Entry("raw", 0),
    Entry("none", 0),
    *(Entry("bucket", m) for m in BUCKETS),
]
PREDICTING = [Entry("rice", k, flips, True) for flips in (False, True) for k in RICE]
BY_BYTE = {entry.byte: entry for entry in [*ENTRIES, *PREDICTING]}


def _default(context: tuple[int, int]) -> Entry:
    step, rank = context
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
    if entry.kind == "raw":
        return Fraction(form.bits)
    if entry.kind == "none":
        return Fraction((value != 0) << 20)
    events = min(MAX_EVENTS, abs(value))
    escape = form.bits if events == MAX_EVENTS else 0
    return Fraction(1, 2**entry.bits) + events * (entry.bits + 2) + escape


def _bits_of(form: Form, entry: Entry, values: Counter[int]) -> Fraction:
    return sum((_cost(form, entry, value) * count for value, count in values.items()), Fraction(0))


def _choose(form: Form, known: list[Known], moved: list[int], has_last: bool) -> dict[tuple[int, int], Entry]:
    plain: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    rests: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for own, difference in zip(known, moved, strict=True):
        if own.context is not None:
            plain[own.context][difference * own.sign] += 1
            rests[own.context][difference * own.sign - own.prediction] += 1
    table = {}
    for context, values in plain.items():
        if values.total() >= RARE:
            costs = [(_bits_of(form, entry, values), entry) for entry in ENTRIES]
            if has_last:
                costs += [(_bits_of(form, entry, rests[context]), entry) for entry in PREDICTING]
            table[context] = min(costs, key=lambda pair: pair[0])[1]  # the first of the best
        else:
            table[context] = _default(context)
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
        i: table[context]
        for i in range(begin, min(begin + TILE, len(known)))
        if (context := known[i].context) is not None
    }
    buckets = []
    for m in BUCKETS:
        own = [i for i, entry in entries.items() if entry.kind == "bucket" and entry.bits == m]
        buckets += [own[first : first + 2**m] for first in range(0, len(own), 2**m)]
    return Tile(entries, buckets)


def _encode_tile(
    form: Form, tile: Tile, known: list[Known], moved: list[int], new: Sequence[int]
) -> tuple[bytes, bytes]:
    unary, fields, of_events, escapes = "", "", "", ""
    for i, entry in tile.entries.items():
        if entry.kind == "raw":
            fields += _field(new[i], form.bits)
        if entry.kind == "rice":
            value = moved[i] * known[i].sign - known[i].prediction * entry.predicts
            rest = zigzag(-value if entry.flips else value)
            quotient = min(MAX_QUOTIENT, rest >> entry.bits)
            unary += "0" * quotient + "1"
            fields += _field(new[i], form.bits) if quotient == MAX_QUOTIENT else _field(rest, entry.bits)
    for bucket in tile.buckets:
        m, count = tile.entries[bucket[0]].bits, 0
        for place, i in enumerate(bucket):
            events = min(MAX_EVENTS, abs(moved[i]))
            of_events += (_field(moved[i] < 0, 1) + _field(place, m)) * events
            count += events
            if events == MAX_EVENTS:
                escapes += _field(new[i], form.bits)
        unary += "0" * count + "1"
    return _words(unary), _words(fields + of_events + escapes)


def encoded(form: Form, held: Sequence[int], new: Sequence[int], last: Sequence[int] | None) -> bytes:
    """The payload of these patterns."""
    raw = b"".join(each.to_bytes(form.bits // 8, "little") for each in new) if form.bits > 4 else bytes(
        low | high << 4 for low, high in zip(new[::2], new[1::2], strict=True)
    )  # fmt: skip
    moved = [number(form, b) - number(form, a) for a, b in zip(held, new, strict=True)]
    levels, base = _scales(form, held, moved)
    known = _all_known(form, held, last, levels, base)
    table = _choose(form, known, moved, last is not None)
    tiles = [_encode_tile(form, _tile(known, table, begin), known, moved, new) for begin in range(0, len(held), TILE)]
    head = base.to_bytes(2, "little", signed=True)
    head += b"".join((len(run) // 4).to_bytes(2, "little") for tile in tiles for run in tile)
    head += bytes(low | high << 4 for low, high in zip(levels[::2], [*levels[1::2], 0], strict=False))
    head += bytes(table[context].byte for context in _common(known))
    head += b"\0" * (-len(head) % 4)
    payload = head + b"".join(unary for unary, _ in tiles) + b"".join(fields for _, fields in tiles)
    return payload if len(payload) < len(raw) else raw


def _common(known: list[Known]) -> list[tuple[int, int]]:
    """The contexts that have an entry, in order."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for own in known:
        if own.context is not None:
            counts[own.context] += 1
    return sorted(context for context, count in counts.items() if count >= RARE)


class _Bits:
    """Reads a run of bits from its begin."""

    def __init__(self, words: bytes) -> None:
        self._bits = "".join(_field(byte, 8) for byte in words)
        self._at = 0

    def field(self, width: int) -> int:
        bits = self._bits[self._at : self._at + width]
        self._at += width
        return sum(int(bit) << place for place, bit in enumerate(bits))

    def unary(self) -> int:
        begin, self._at = self._at, self._bits.index("1", self._at) + 1
        return self._at - begin - 1


def decoded(form: Form, held: Sequence[int], payload: bytes, last: Sequence[int] | None) -> list[int]:
    """The new patterns of a payload that is not the new values themselves."""
    num_tiles, num_blocks = -(-len(held) // TILE), -(-len(held) // BLOCK)
    base = int.from_bytes(payload[:2], "little", signed=True)
    lengths = [int.from_bytes(payload[2 + 2 * k : 4 + 2 * k], "little") for k in range(2 * num_tiles)]
    at = 2 + 4 * num_tiles
    levels = [payload[at + k // 2] >> 4 * (k % 2) & 15 for k in range(num_blocks)]
    at += -(-num_blocks // 2)
    known = _all_known(form, held, last, levels, base)
    table = {context: _default(context) for own in known if (context := own.context) is not None}
    for context in _common(known):
        table[context] = BY_BYTE[payload[at]]
        at += 1
    at += -at % 4
    new = list(held)
    fields_at = at + 4 * sum(lengths[::2])
    for k, begin in enumerate(range(0, len(held), TILE)):
        unary, fields = (
            _Bits(payload[where:][: 4 * size])
            for where, size in ((at, lengths[2 * k]), (fields_at, lengths[2 * k + 1]))
        )
        at, fields_at = at + 4 * lengths[2 * k], fields_at + 4 * lengths[2 * k + 1]
        _decode_tile(form, _tile(known, table, begin), known, unary, fields, new)
    return new


def _decode_tile(form: Form, tile: Tile, known: list[Known], unary: _Bits, fields: _Bits, new: list[int]) -> None:
    for i, entry in tile.entries.items():
        quotient = unary.unary() if entry.kind == "rice" else 0
        if entry.kind == "raw" or quotient == MAX_QUOTIENT:
            new[i] = fields.field(form.bits)
        elif entry.kind == "rice":
            rest = (quotient << entry.bits) + fields.field(entry.bits)
            value = (rest + 1) // 2 if rest % 2 else -(rest // 2)
            value = (-value if entry.flips else value) + known[i].prediction * entry.predicts
            new[i] = pattern_of(form, number(form, new[i]) + value * known[i].sign)
    moved: dict[int, int] = defaultdict(int)
    for bucket in tile.buckets:
        for _ in range(unary.unary()):
            is_down = fields.field(1)
            moved[bucket[fields.field(tile.entries[bucket[0]].bits)]] += -1 if is_down else 1
    for bucket in tile.buckets:
        for i in bucket:
            if abs(moved[i]) == MAX_EVENTS:
                new[i] = fields.field(form.bits)
            else:
                new[i] = pattern_of(form, number(form, new[i]) + moved[i])
