"""The base of every section of a job description. It checks bounds on values, and refuses values by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from laconic.errors import JobError
from laconic.policy import Bound, Policy, from_keys, keys_of, refusing_as, shown, to_keys, with_keys

_MOST_NESTED = 100  # lists and tables within each other; the largest configurations of models have about five


class ConfigError(JobError):
    """The configuration is wrong; the message names the key and says what it should be."""


Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],  # with float16, so that its refusal can say why
    Bound(
        lambda value: value != "float16",
        "not be float16: an optimizer's small updates vanish in it. Use 'bfloat16', or 'float32' with "
        "shard.param_dtype = 'float16'",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Section(Policy):
    """A section of the configuration. Its name is the class's, in lower case and without `Config`.

    A field's annotation states which values a key accepts, for example `Count` for an integer of at least 1. These
    bounds are checked whenever a section is made, from a file, from options or in Python.

    Raises:
        ConfigError: a value is out of bounds, or values make no sense together.
    """

    def __post_init__(self) -> None:
        for name, key in keys_of(type(self)).items():
            is_own = len(key.path) == 1  # as it was given: its short spelling, if it has one, is not read yet
            refuse_absurd(getattr(self, key.path[0]) if is_own else key.read(self), f"{self.prefix()}{name}")
        with self.in_own_words():
            super().__post_init__()

    @classmethod
    def prefix(cls) -> str:
        """The words before a key in a message: the section's name and a dot."""
        return f"{cls.__name__.removesuffix('Config').lower()}."

    @classmethod
    def of_keys(cls, values: Mapping[str, Any]) -> Self:
        """The section with these values of its keys, and defaults for the others.

        Raises:
            ConfigError: see `Section`.
        """
        with cls.in_own_words():
            return from_keys(cls, values)

    def with_keys(self, **values: Any) -> Self:
        """The section with other values of some keys.

        Raises:
            ConfigError: see `Section`.
        """
        with self.in_own_words():
            return with_keys(self, **values)

    @classmethod
    def in_own_words(cls) -> AbstractContextManager[None]:
        """Let a refusal of a policy of this section name its keys."""
        return refusing_as(ConfigError, cls.prefix(), " = ")

    def pick(self, *keys: str) -> dict[str, Any]:
        """The values of `keys` as keyword arguments, for a function whose parameters have the same names."""
        return {key: getattr(self, key) for key in keys}

    def _check_only_with(self, switch: str, *choices: str, keys: Collection[str]) -> None:
        """Refuse `keys` that are not at their defaults, unless the key `switch` has one of the values `choices`."""
        if getattr(self, switch) in choices:
            return
        path, wanted = f"{self.prefix()}{switch}", " or ".join(map(repr, choices))
        message = f"is for {path} = {wanted}, got {getattr(self, switch)!r}; leave it out, or change {path}"
        values = to_keys(self)
        for name, key in keys_of(type(self)).items():
            if name in keys:
                self._check(name, values[name] == key.default, message)


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
