"""Plain values in a store or a file that others write too, read by their types.

[Note: Entries]
A store trusts everybody who reaches its port, and a bit may flip in it. So a value that this process has not written
itself is read in four steps: its length, the depth of its brackets, its JSON, and its type, which is a dataclass or a
plain one. The names of the fields and the types of their values must be exactly those of the dataclass; a list stands
for a tuple, and True is no number. An entry of a store begins with a checksum, so a flipped bit in a number is found
too. Each step fails in one way only, an EntryError. A counter, to which stores add, is a decimal number without a
checksum.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union

_T = TypeVar("_T")

MOST_BYTES = 1 << 20
"""The length of an entry."""
_MOST_DEPTH = 64
_MOST_NUMBER = 1 << 62
_MOST_SHOWN = 60  # characters of a value in an error
_MARKS = re.compile(rb'"(?:[^"\\]+|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # a string, which may have brackets, or a bracket


class EntryError(ValueError):
    """The bytes are no value of the type that belongs here."""


def encode(value: Any) -> str:
    """Return a plain value or a dataclass as an entry of a store."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps(plain, default=_plain)
    return f"{zlib.crc32(text.encode()):08x} {text}"


def decode(kind: type[_T], entry: bytes) -> _T:
    """Return the value of `encode`, of the type `kind`.

    Raises:
        EntryError: a byte is not as it was written, or the value has another type.
    """
    checksum, _, text = entry.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise EntryError(f"{_shown(entry)} does not match its checksum")
    return typed(kind, parse(text))


def counter(entry: bytes) -> int:
    """Return the number in an entry to which stores add. Raises: EntryError if there is none, or it is negative."""
    if not entry.isdigit() or len(entry) > 19 or int(entry) >= _MOST_NUMBER:
        raise EntryError(f"{_shown(entry)} is no count")
    return int(entry)


def parse(text: bytes, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the plain value of a JSON text.

    Raises:
        EntryError: it is longer than `most_bytes`, nested too deeply, or no JSON.
    """
    if len(text) > most_bytes:
        raise EntryError(f"{len(text)} bytes are more than the {most_bytes} that belong here")
    depth = 0
    for mark in _MARKS.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark[0], 0)
        if depth > _MOST_DEPTH:
            raise EntryError(f"{_shown(text)} is nested more than {_MOST_DEPTH} deep")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise EntryError(f"{_shown(text)} is no JSON ({error})") from error


def typed(kind: type[_T], value: Any) -> _T:
    """Return a plain value as the type `kind`: see [Note: Entries].

    `kind` is a dataclass, an Enum, a Literal, a plain type, or a tuple, list, dict or union of such.

    Raises:
        EntryError: the value has another type, or the dataclass refuses it.
    """
    return typing.cast(_T, _typed(kind, value, "it"))


def _typed(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_of(arguments, value, place)
    if origin in (tuple, list):
        return _sequence(origin, arguments, value, place)
    if origin is dict:
        if type(value) is not dict:
            _refuse(value, place)
        return {key: _typed(arguments[1], each, f"{place}[{key[:_MOST_SHOWN]!r}]") for key, each in value.items()}
    if is_dataclass(kind):
        return _instance(kind, value, place)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _one_of({each.value: each for each in kind}, value, place)
    if origin is Literal:
        return _one_of({each: each for each in arguments}, value, place)
    return _simple(kind, value, place)


def _one_of(choices: Mapping[Any, Any], value: Any, place: str) -> Any:
    """The choice that a plain value stands for. True is no 1."""
    found = [meant for plain, meant in choices.items() if plain == value and type(plain) is type(value)]
    return found[0] if found else _refuse(value, place)


def _simple(kind: Any, value: Any, place: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < _MOST_NUMBER else value
    is_kind = value is None if kind in (None, type(None)) else type(value) is kind
    is_sound = abs(value) < _MOST_NUMBER if is_kind and kind is int else True
    if not is_kind or not is_sound or (kind is float and not math.isfinite(value)):
        _refuse(value, place, getattr(kind, "__name__", "None"))
    return value


def _first_of(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return _typed(kind, value, place)
        except EntryError as error:
            errors.append(error)
    raise errors[0]


def _sequence(origin: Any, kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    if type(value) is not list:
        _refuse(value, place, "list")
    is_open = origin is list or (len(kinds) == 2 and kinds[1] is Ellipsis)
    if not is_open and len(kinds) != len(value):
        raise EntryError(f"{place} has {len(value)} values, and {len(kinds)} belong here")
    each_kind = [kinds[0]] * len(value) if is_open else kinds
    pairs = enumerate(zip(each_kind, value, strict=True))
    return origin(_typed(kind, each, f"{place}[{index}]") for index, (kind, each) in pairs)


def _instance(kind: Any, value: Any, place: str) -> Any:
    if type(value) is not dict:
        _refuse(value, place, kind.__name__)
    hints = _hints(kind)
    if value.keys() != hints.keys():
        missing, more = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys())
        raise EntryError(f"{place} lacks the fields {missing} and has the fields {_shown(str(more).encode())} besides")
    try:
        return kind(**{name: _typed(hint, value[name], f"{place}.{name}") for name, hint in hints.items()})
    except EntryError:
        raise
    except ValueError as error:
        raise EntryError(f"{place} is no {kind.__name__}: {error}") from error


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"an entry has no place for a {type(value).__name__}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise EntryError("a name stands there twice")
    return found


def _refuse(value: Any, place: str, expected: str = "") -> typing.NoReturn:
    shown = repr(value)[:_MOST_SHOWN] if not isinstance(value, int) or abs(value) < _MOST_NUMBER else "a huge number"
    raise EntryError(f"{place} is {shown}" + (f", and {expected} belongs here" if expected else ""))


def _shown(entry: bytes) -> str:
    return repr(entry[:_MOST_SHOWN])[1:] + (" ..." if len(entry) > _MOST_SHOWN else "")
