"""A training job as one object, which is read from TOML, strictly, and written back to TOML."""

import contextlib
import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from laconic.config import sections
from laconic.config.section import ConfigError, Section, refuse_absurd
from laconic.config.sections import SyncConfig
from laconic.policy import keys_of, shown, to_keys

_T = TypeVar("_T")

_HINTS = {
    "dp_shard": "dp_shard is nodes x local ranks and comes from torchrun",
    "dp_shard_size": "dp_shard is nodes x local ranks and comes from torchrun",
    "dp_replicate": "dp_replicate is `sync.islands`, with sync.mode = 'local'",
    "dp_replicate_size": "dp_replicate is `sync.islands`, with sync.mode = 'local'",
    **dict.fromkeys(
        ("format", "chat_template", "loss", "packing", "padding", "too_long"),
        "rows of tokens come from TRL or datasets, docs/fine-tune.md says how; leave the key out",
    ),
    "wandb_project": "the package wandb reads it from the variable WANDB_PROJECT",
    "wandb_name": "the package wandb reads it from the variable WANDB_NAME",
}
"""Advice for keys that other trainers, or earlier releases, have."""
_TOML_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a table"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training job, with one attribute for each section of its TOML file."""

    model: sections.ModelConfig = field(default_factory=sections.ModelConfig)
    lora: sections.LoraConfig = field(default_factory=sections.LoraConfig)
    data: sections.DataConfig = field(default_factory=sections.DataConfig)
    optimizer: sections.OptimizerConfig = field(default_factory=sections.OptimizerConfig)
    shard: sections.ShardConfig = field(default_factory=sections.ShardConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    schedule: sections.ScheduleConfig = field(default_factory=sections.ScheduleConfig)
    pipeline: sections.PipelineConfig = field(default_factory=sections.PipelineConfig)
    train: sections.TrainConfig = field(default_factory=sections.TrainConfig)
    log: sections.LogConfig = field(default_factory=sections.LogConfig)


def load(path: str | Path) -> Config:
    """Read a job from a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a wrong key or value. The message names the file
            and, for an unknown key, the nearest valid one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from error
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    try:
        return from_dict(Config, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The table that a TOML text describes.

    Raises:
        ValueError: it describes none, has a number of thousands of digits, or lists within hundreds of lists.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it has too many lists or tables within each other") from None


def from_dict(cls: type[_T], table: Mapping[str, Any], prefix: str = "") -> _T:
    """Make a `Config` or a section from plain values. Lists become tuples, and integers floats, where fields are such.

    Messages name a key with `prefix` before it: the section's name and a dot, or nothing for a whole `Config`.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or makes no sense.
    """
    if issubclass(cls, Section):
        return cls.of_keys(values_of(cls, {key: [value] for key, value in table.items()}, prefix))
    hints, found = get_type_hints(cls), {}
    for key, value in table.items():
        refuse_absurd(key, "a key")
        if key not in hints:
            raise ConfigError(_unknown_key(list(hints), key, prefix))
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"`{prefix}{key}` is a section ([{prefix}{key}]), got {shown(value)} ({_type_name(value)})"
            )
        found[key] = from_dict(hints[key], value, f"{prefix}{key}.")
    return cls(**found)


def values_of(cls: type[Section], table: Mapping[str, list[Any]], prefix: str) -> dict[str, Any]:
    """The values of keys of a section, each the first of those in `table` that has the type of its key.

    Raises:
        ConfigError: a key is unknown, or no value for it has its type.
    """
    keys, found = keys_of(cls), {}
    for key, values in table.items():
        refuse_absurd(key, "a key")
        if key not in keys:
            raise ConfigError(_unknown_key(list(keys), key, prefix))
        found[key] = _convert(keys[key].hint, values, f"{prefix}{key}")
    return found


def all_keys() -> list[str]:
    """Every `section.key` of the configuration."""
    return [f"{section}.{key}" for section, cls in get_type_hints(Config).items() for key in keys_of(cls)]


def to_dict(config: Any) -> dict[str, Any]:
    """A `Config` or a section as plain JSON values, the inverse of `from_dict`. Keys that are not set are left out."""
    table: dict[str, Any] = {}
    for key, value in (to_keys(config) if isinstance(config, Section) else vars(config)).items():
        if dataclasses.is_dataclass(value):
            table[key] = to_dict(value)
        elif value is not None:
            table[key] = list(value) if isinstance(value, tuple) else value
    return table


def to_toml(config: Config) -> str:
    """The effective configuration as TOML, from which `load` makes an equal object."""
    import tomli_w  # of the extra `train`: those who read versions have torch alone

    return tomli_w.dumps(_without_none(to_dict(config)))


def _without_none(value: Any) -> Any:
    """A copy without the nulls that a model's table may have. TOML has no null, and null means "not set"."""
    if isinstance(value, dict):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _unknown_key(valid: list[str], key: str, prefix: str) -> str:
    name, keys = f"{prefix}{key}", [f"{prefix}{other}" for other in valid]
    if key in _HINTS:
        return f"unknown key `{name}`: {_HINTS[key]}"
    elsewhere = [other for other in all_keys() if other.split(".")[-1] == key]
    nearest = (elsewhere or difflib.get_close_matches(name, keys, n=1, cutoff=0.0))[0]
    kind = "key" if prefix else "section"
    return f"unknown {kind} `{name}`; the nearest valid key is `{nearest}` (valid here: {', '.join(keys)})"


def _convert(hint: Any, values: list[Any], name: str) -> Any:
    for value in values:
        refuse_absurd(value, name)
        with contextlib.suppress(ValidationError):
            return TypeAdapter(hint).validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
    raise ConfigError(f"`{name}` must be {type_in_words(hint)}, got {shown(values[0])} ({_type_name(values[0])})")


def type_in_words(hint: Any) -> str:
    """A type as a user writes it in TOML."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_in_words(arg) for arg in args if arg is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(arg) for arg in args)
    if origin is tuple:
        count = "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
        return f"{count} of {type_in_words(args[0])} values"
    return _TOML_TYPES[origin or hint]


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "table"}
    return names.get(type(value), type(value).__name__)
