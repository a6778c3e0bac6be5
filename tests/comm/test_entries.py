"""Entries of stores: what was written comes back, and everything else is refused in one way."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from enum import Enum
from typing import Any, Literal

import pytest

from laconic.comm.entries import EntryError, counter, decode, encode, parse, typed


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    number: int
    is_on: bool
    colour: Colour
    side: Literal["left", "right"]
    many: tuple[int, ...]
    pair: tuple[str, int]
    lines: list[tuple[str, int] | None]
    table: dict[str, Any]
    inner: Inner | None = None

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number is negative")


THING = Thing(
    number=3, is_on=True, colour=Colour.BLUE, side="left", many=(1, 2), pair=("a", 1), lines=[("b", 2), None],
    table={"x": [1, {"y": None}]}, inner=Inner(name='[{"', share=0.5),
)  # fmt: skip


def forged(value: Any) -> bytes:
    """An entry with a checksum that matches."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return f"{zlib.crc32(text):08x} ".encode() + text


@pytest.mark.parametrize(
    ("kind", "value"), [(Thing, THING), (int, -5), (str, "zwölf"), (tuple[int, ...], ()), (bool, False)]
)
def test_a_value_comes_back(kind: Any, value: Any) -> None:
    assert decode(kind, encode(value).encode()) == value


def test_every_flipped_bit_is_found() -> None:
    entry = encode(THING).encode()
    for place in range(8 * len(entry)):
        damaged = bytearray(entry)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(EntryError):
            decode(Thing, bytes(damaged))


@pytest.mark.parametrize(
    "changes",
    [
        {"number": "3"}, {"number": 3.0}, {"number": True}, {"number": None}, {"number": -1}, {"number": 10**30},
        {"is_on": 1}, {"colour": "green"}, {"colour": ["red"]}, {"side": "up"}, {"many": 1}, {"many": [1, "2"]},
        {"many": {"1": 2}}, {"pair": ["a"]}, {"pair": ["a", 1, 2]}, {"lines": [["b"]]}, {"table": [1]},
        {"inner": {"name": "a"}}, {"inner": {"name": "a", "share": float("nan")}}, {"inner": 0}, {"more": 1},
    ],
)  # fmt: skip
def test_other_fields_and_types_are_refused(changes: dict[str, Any]) -> None:
    plain = json.loads(encode(THING)[9:])
    assert decode(Thing, forged(plain)) == THING
    with pytest.raises(EntryError):
        decode(Thing, forged(plain | changes))
    del plain["inner"]  # although it has a default
    with pytest.raises(EntryError, match="lacks the fields"):
        decode(Thing, forged(plain))


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[1", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b'{"a": 1, "a": 2}',
        b'"' + b'\\"' * 300_000, b" " * (2 << 20), b'["' + b"x" * (2 << 20) + b'"]', b"[" * 65 + b"]" * 65,
    ],
    ids=lambda text: repr(text[:8]),
)  # fmt: skip
def test_a_text_that_is_no_json_of_modest_size_is_refused(text: bytes) -> None:
    with pytest.raises(EntryError):
        parse(text)
    with pytest.raises(EntryError):
        decode(Thing, forged(text))


def test_brackets_in_strings_do_not_count() -> None:
    assert parse(json.dumps(["[" * 1000, '\\"' + "{" * 1000]).encode()) == ["[" * 1000, '\\"' + "{" * 1000]
    assert typed(list[int], parse(b"[1, 2]")) == [1, 2]


@pytest.mark.parametrize(
    "entry", [b"", b"x", b"-1", b"1.5", b"[1]", b" 1", b"1_0", b"9" * 30, b"9" * 5000, "²".encode()]
)
def test_a_counter_is_a_decimal_number(entry: bytes) -> None:
    assert counter(b"12") == 12
    with pytest.raises(EntryError):
        counter(entry)


def test_random_bytes_raise_nothing_else() -> None:
    dice = random.Random(3)
    for _ in range(2000):
        text = dice.randbytes(dice.randrange(40))
        for entry in (text, forged(text)):
            with pytest.raises(EntryError):
                decode(Thing, entry)
