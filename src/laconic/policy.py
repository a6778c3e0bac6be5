"""What policies have in common: they check themselves, and job descriptions contain them by their fields.

[Note: Keys]
A policy is a frozen dataclass that refuses values that make no sense. A section of a TOML file, the options of another
trainer and the arguments of a class contain policies. Outside Python such a container is flat: every field of a policy
in it is a key. The key has the field's name, or the one that `option(key=)` gives it; its documentation is the field's
docstring; its default is that of the policy which the container has by default. A policy with a short spelling, such as
"4bit", is one key: `option(of=)` reads what a file says, and `option(plain=)` writes it. So a new field of a policy is
a new key everywhere.

A refusal is written once, with places for names. `{check_every}` is the name of a key, `{check_every=}` its name and
value, `{check_every=100}` its name and another value. Python sees `Checks(interval=5)`, a TOML file
`shard.check_every = 5`, and a trainer's option `check_every=5`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

_P = TypeVar("_P", bound="Policy")
_F = TypeVar("_F", bound=Callable[..., Any])
_PLACE = re.compile(r"\{(\w+)(=?)([^{}]*)\}")
_MOST_SHOWN = 200  # characters of a value in a message


def _cached(function: _F) -> _F:
    """`functools.cache`; type checkers do not let it have classes whose objects have a `__hash__` of their own."""
    return cache(function)  # type: ignore[return-value]


class Bound(NamedTuple):
    """A bound on the values of a field, as part of its annotation. None (not set) is always accepted."""

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


class PolicyError(ValueError):
    """A policy refuses its values. The message is in Python's words; `told` has it in those of a file or an option."""

    policy: Policy
    text: str

    @classmethod
    def of(cls, policy: Policy, text: str) -> PolicyError:
        """Make the error of a policy from a text with places for names: [Note: Keys]."""
        error = cls(_tell(policy, text, _in_python))
        error.policy, error.text = policy, text
        return error

    def told(self, prefix: str, equals: str) -> str:
        """The message with keys as a file or an option spells them: `prefix` before a name, `equals` before a value."""

        def spell(policy: Policy, key: Key, value: str | None) -> str:
            if value is None:
                return f"{prefix}{key.name}"
            return f"{prefix}{key.name}{equals}{value or shown(key.read(policy))}"

        return _tell(self.policy, self.text, spell)


@contextmanager
def refusing_as(error: type[Exception], prefix: str, equals: str) -> Iterator[None]:
    """Turn the refusal of a policy in the block into an `error` in the words of a file or an option: see `told`."""
    try:
        yield
    except PolicyError as refusal:
        raise error(refusal.told(prefix, equals)) from None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A frozen description that checks itself: its choices, its bounds, and which values go together.

    A field's annotation states which values it accepts: a `Literal`, or a `Bound` such as `Count`. A field that holds a
    policy takes its short spelling, too.

    Raises:
        PolicyError: a value is not known or out of bounds, or values make no sense together.
    """

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            parse = each.metadata.get("of")
            if parse is not None:
                try:
                    object.__setattr__(self, each.name, parse(getattr(self, each.name)))
                except (TypeError, ValueError) as error:
                    if isinstance(error, PolicyError) and "plain" not in each.metadata:  # it names keys of this policy
                        raise
                    raise PolicyError.of(self, f"{{{_name(each)}}}: {error}") from None
        for name, key, choices, is_integer, bounds in _rules(type(self)):
            value = getattr(self, name)
            for choice in choices:
                if value is not None and value not in choice:
                    raise PolicyError.of(self, f"{{{key}=}} is not known; use one of {', '.join(map(repr, choice))}")
            if is_integer:
                self._check(key, value is None or isinstance(value, Integral), "must be an integer")
            items = value if isinstance(value, tuple) else (value,)
            for bound in bounds:
                self._check(key, all(item is None or bound.holds(item) for item in items), f"must {bound.text}")
        self._check_keys()

    def _check_keys(self) -> None:
        """Refuse values that make no sense together; a policy without such values keeps this method."""

    def _check(self, key: str, condition: bool, message: str) -> None:
        """Refuse the value of `key` unless `condition` holds. `message` follows the key and its value."""
        if not condition:
            raise PolicyError.of(self, f"{{{key}=}} {message}")


def option(
    default: Any, *, key: str = "", of: Callable[[Any], Any] | None = None, plain: Callable[[Any], Any] | None = None,
    hint: Any = None,
) -> Any:  # fmt: skip
    """A field of a policy: see [Note: Keys].

    Args:
        default: its value by default.
        key: its name in files and options, if another than in Python.
        of: makes the field's value from any spelling of it.
        plain: makes a value for files of the field's value, of type `hint`; None stands for "not set".
        hint: the type in files and options, if another than the annotation.
    """
    given = {"key": key, "of": of, "plain": plain, "hint": hint}
    return field(default=default, metadata={name: value for name, value in given.items() if value})


class Key(NamedTuple):
    """One key of a container of policies: [Note: Keys]."""

    name: str
    hint: Any
    default: Any
    """The value by default, as a file says it."""
    path: tuple[str, ...]
    """The attributes that lead to the field."""
    owner: type
    """The class that has the field."""
    plain: Callable[[Any], Any] | None

    def read(self, container: Any) -> Any:
        """The value in a container, as a file says it."""
        for attribute in self.path:
            container = getattr(container, attribute)
        return container if self.plain is None else self.plain(container)

    def documentation(self) -> str:
        """The docstring of the field, in one line."""
        return documented(self.owner).get(self.path[-1], "")


@_cached
def keys_of(container: type) -> Mapping[str, Key]:
    """The keys of a policy, and of the policies in it, by name, in their order."""
    found: dict[str, Key] = {}
    hints = get_type_hints(container)
    for each in dataclasses.fields(container):
        if _is_flat(hints[each.name], each):
            base = _default_of(each)
            inner = [
                key._replace(default=key.read(base), path=(each.name, *key.path))
                for key in keys_of(hints[each.name]).values()
            ]
        else:
            plain, default = each.metadata.get("plain"), _default_of(each)
            hint, shown_default = each.metadata.get("hint", hints[each.name]), plain(default) if plain else default
            inner = [Key(_name(each), hint, shown_default, (each.name,), container, plain)]
        found |= {key.name: key for key in inner if each.init}
    return found


def to_keys(container: Any) -> dict[str, Any]:
    """The values of all keys of a policy, as a file says them."""
    return {name: key.read(container) for name, key in keys_of(type(container)).items()}


def from_keys(container: type[_P], values: Mapping[str, Any]) -> _P:
    """Make a policy from values of its keys, and defaults for the others.

    Raises:
        TypeError: a key is unknown.
        PolicyError: see `Policy`.
    """
    return container(**_arguments(container, values, {each.name: _default_of(each) for each in _fields(container)}))


def with_keys(policy: _P, **values: Any) -> _P:
    """A copy of a policy with other values of some keys.

    Raises:
        TypeError: a key is unknown.
        PolicyError: see `Policy`.
    """
    before = {each.name: getattr(policy, each.name) for each in _fields(type(policy))}
    return dataclasses.replace(policy, **_arguments(type(policy), values, before))


@_cached
def documented(cls: type) -> Mapping[str, str]:
    """The docstrings of a class's fields, by name, each in one line. Empty where there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    except (OSError, KeyError):
        return {}
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return {
        each.target.id: " ".join(after.value.value.split())
        for each, after in pairwise(body)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def shown(value: Any) -> str:
    """A value for a message: its `repr`, or the beginning of a long one; of a policy, what is not as by default."""
    if isinstance(value, Policy):
        given = {each.name: getattr(value, each.name) for each in _fields(type(value))}
        changed = [
            f"{each.name}={given[each.name]!r}" for each in _fields(type(value)) if given[each.name] != each.default
        ]
        return f"{type(value).__name__}({', '.join(changed)})"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _arguments(container: type, values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that change when a container with the fields `before` gets these values of its keys."""
    keys, fields = keys_of(container), {each.name: each for each in _fields(container)}
    changed: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in keys:
            raise TypeError(f"{container.__name__} has no key {name!r}; its keys are {', '.join(keys)}")
        changed.setdefault(keys[name].path[0], {})[name] = value
    hints = get_type_hints(container)
    return {
        attribute: with_keys(before[attribute], **given)
        if _is_flat(hints[attribute], fields[attribute])
        else next(iter(given.values()))
        for attribute, given in changed.items()
    }


def _tell(policy: Policy, text: str, spell: Callable[[Policy, Key, str | None], str]) -> str:
    """Fill the places of a text: `spell` gets None for a name, and an empty text for the policy's own value."""
    keys = keys_of(type(policy))

    def fill(place: re.Match[str]) -> str:
        name, equals, value = place.groups()
        return spell(policy, keys[name], value if equals else None) if name in keys else place[0]

    return _PLACE.sub(fill, text)


def _in_python(policy: Policy, key: Key, value: str | None) -> str:
    owner: Any = policy
    for attribute in key.path[:-1]:
        owner = getattr(owner, attribute)
    field_name, own = key.path[-1], getattr(owner, key.path[-1])
    if value != "":
        name = field_name if owner is policy else key.name  # arguments have the names of keys
        return name if value is None else f"{name}={value}"
    return shown(own) if isinstance(own, Policy) else f"{type(owner).__name__}({field_name}={shown(own)})"


def _fields(container: type) -> Iterator[dataclasses.Field[Any]]:
    return (each for each in dataclasses.fields(container) if each.init)


def _name(each: dataclasses.Field[Any]) -> str:
    return str(each.metadata.get("key", each.name))


def _default_of(each: dataclasses.Field[Any]) -> Any:
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def _is_flat(hint: Any, each: dataclasses.Field[Any]) -> bool:
    """Whether a field holds a policy whose fields are keys of the container."""
    return isinstance(hint, type) and issubclass(hint, Policy) and "plain" not in each.metadata


_Rule = tuple[str, str, tuple[tuple[Any, ...], ...], bool, tuple[Bound, ...]]
"""What a field's annotation demands: its name and its key, choices, whether it is an integer, and bounds."""


@_cached
def _rules(cls: type) -> tuple[_Rule, ...]:
    hints = get_type_hints(cls, include_extras=True)

    def is_integer(hint: Any) -> bool:
        return hint is int or get_args(hint)[:1] == (int,)

    named = ((each.name, _name(each), hints[each.name]) for each in dataclasses.fields(cls))
    return tuple(
        (name, key, tuple(_choices(hint)), is_integer(hint), tuple(_bounds(hint))) for name, key, hint in named
    )


def _bounds(hint: Any) -> Iterator[Bound]:
    """The bounds in an annotation, and in the types of a tuple's items and of a union's alternatives."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _bounds(part)


def _choices(hint: Any) -> Iterator[tuple[Any, ...]]:
    """The values of an annotation that is a `Literal`, also one that has a bound or may be None."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        yield get_args(hint)
    elif get_origin(hint) is Annotated or len(parts) == 1:
        yield from _choices(parts[0])
