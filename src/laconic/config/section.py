"""The base of every section of a job description. It checks bounds on values, and refuses values by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from laconic.errors import JobError

_MOST_SHOWN = 200  # characters of a value in a message
_MOST_NESTED = 100  # lists and tables within each other; the largest configurations of models have about five


class ConfigError(JobError):
    """The configuration is wrong; the message names the key and says what it should be."""


class Bound(NamedTuple):
    """A bound on the values of a key, as part of the field's annotation. None (not set) is always accepted."""

    holds: Callable[[Any], bool]
    """Whether a value is within the bound."""
    text: str
    """The end of the sentence "section.key = value must ..."."""


Count = Annotated[int, Bound(lambda value: value >= 1, "be at least 1")]
Size = Annotated[int, Bound(lambda value: value >= 0, "not be negative")]
Positive = Annotated[float, Bound(lambda value: 0 < value < math.inf, "be a positive number")]
NonNegative = Annotated[float, Bound(lambda value: value >= 0, "not be negative")]
Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "lie in [0, 1]")]
ProperShare = Annotated[float, Bound(lambda value: 0 <= value < 1, "lie in [0, 1)")]
Switch = Annotated[bool | float, Bound(lambda value: 0 <= value <= 1, "be true, false or in [0, 1]")]
AtLeastTwo = Annotated[int, Bound(lambda value: value >= 2, "be at least 2")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],  # with float16, so that its refusal can say why
    Bound(
        lambda value: value != "float16",
        "not be float16: an optimizer's small updates vanish in it. Use 'bfloat16', or 'float32' with "
        "shard.param_dtype = 'float16'",
    ),
]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the configuration. Its name is the class's, in lower case and without `Config`.

    A field's annotation states which values a key accepts, for example `Count` for an integer of at least 1. These
    bounds are checked whenever a section is made, from a file, from options or in Python.

    Raises:
        ConfigError: a value is out of bounds, or values make no sense together.
    """

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, key)
            refuse_absurd(value, self._path(key))
            values = value if isinstance(value, tuple) else (value,)
            for bound in _bounds(hint):
                self._check(key, all(item is None or bound.holds(item) for item in values), f"must {bound.text}")
        self._check_keys()

    def pick(self, *keys: str) -> dict[str, Any]:
        """The values of `keys` as keyword arguments, for a function whose parameters have the same names."""
        return {key: getattr(self, key) for key in keys}

    def _check_keys(self) -> None:
        """Refuse values that make no sense together; a section without such values keeps this method."""

    def _check(self, key: str, condition: bool, message: str) -> None:
        if not condition:
            value = getattr(self, key)
            plain = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{self._path(key)} = {shown(plain)} {message}")

    def _check_only_with(self, switch: str, *choices: str, keys: Iterable[str]) -> None:
        """Refuse `keys` that are not at their defaults, unless the key `switch` has one of the values `choices`."""
        if getattr(self, switch) in choices:
            return
        path, wanted = self._path(switch), " or ".join(map(repr, choices))
        message = f"is for {path} = {wanted}, got {getattr(self, switch)!r}; leave it out, or change {path}"
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for key in keys:
            self._check(key, getattr(self, key) == defaults[key], message)

    def _path(self, key: str) -> str:
        return f"{type(self).__name__.removesuffix('Config').lower()}.{key}"


def refuse_absurd(value: Any, name: str) -> None:
    """Refuse integers of more than 64 bits and texts that are no Unicode, or have a NUL, also inside lists and tables.

    Lists and tables within more than a hundred others are refused, too. Such values break other programs in obscure
    ways: C's integers and file names have no room for them, and functions that call themselves come to Python's limit.

    Raises:
        ConfigError: `value`, which messages call `name`, is or holds such a value.
    """
    waiting = [(value, name, 0)]
    while waiting:
        item, path, depth = waiting.pop()
        if depth > _MOST_NESTED:
            raise ConfigError(f"{name} has more than {_MOST_NESTED} lists or tables within each other; take some out")
        if isinstance(item, Mapping):
            waiting += [(key, f"a key of {path}", depth + 1) for key in item]
            waiting += [(inner, f"{path}.{key}", depth + 1) for key, inner in item.items()]
        elif isinstance(item, list | tuple):
            waiting += [(inner, f"an item of {path}", depth + 1) for inner in item]
        else:
            _refuse_absurd_leaf(item, path)


def _refuse_absurd_leaf(value: Any, name: str) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{name} is an integer of {value.bit_length()} bits; it must fit into 64 bits")
    if isinstance(value, str):
        try:
            is_text = "\0" not in value and value.encode() is not None
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            raise ConfigError(f"{name} = {shown(value)} has a NUL or is not UTF-8; take these characters out")


def shown(value: Any) -> str:
    """A value for a message: its `repr`, or the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _bounds(hint: Any) -> Iterator[Bound]:
    """The bounds in an annotation, and in the types of a tuple's items and of a union's alternatives."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _bounds(part)
