"""The job description: one frozen dataclass per TOML section, which are in sections.py.

`load` reads a file strictly: an unknown key or a wrong type is a `ConfigError` that names the nearest valid key.
The same object, written back by `to_toml`, is the artefact that fully describes a run and is saved beside its
checkpoints.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from laconic.config.sections import (
    ConfigError,
    DataConfig,
    JobError,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    ShardConfig,
    SyncConfig,
    TrainConfig,
    block,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "JobError",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "ShardConfig",
    "SyncConfig",
    "TrainConfig",
    "all_keys",
    "block",
    "describe",
    "from_dict",
    "load",
    "to_dict",
    "to_toml",
]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)


# --------------------------------------------------------------------------------------------- reading

_HINTS = {
    "dp_shard": "dp_shard is nodes x local ranks and comes from torchrun",
    "dp_shard_size": "dp_shard is nodes x local ranks and comes from torchrun",
    "dp_replicate": "dp_replicate is `sync.islands`, with sync.mode = 'local'",
    "dp_replicate_size": "dp_replicate is `sync.islands`, with sync.mode = 'local'",
}


def load(path: str | Path) -> Config:
    """Read a TOML file; raises `ConfigError` naming the file and the key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    try:
        return from_dict(Config, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def from_dict(cls: type[_T], table: Mapping[str, Any], prefix: str = "") -> _T:
    """Build the dataclass `cls` from plain values, strictly."""
    hints = get_type_hints(cls)
    values = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(_unknown(cls, key, name, prefix))
        values[key] = _convert(hints[key], value, name)
    return cls(**values)


def _unknown(cls: type, key: str, name: str, prefix: str) -> str:
    if key in _HINTS:
        return f"unknown key `{name}`: {_HINTS[key]}"
    keys = [f"{prefix}{k}" for k in get_type_hints(cls)]
    near = [full for full in all_keys() if full.split(".")[-1] == key]  # perhaps right, but in another section
    near = near or difflib.get_close_matches(name, keys, n=1, cutoff=0.0)
    kind = "key" if prefix else "section"
    return f"unknown {kind} `{name}`; the nearest valid key is `{near[0]}` (valid here: {', '.join(keys)})"


def all_keys() -> list[str]:
    """Every `section.key` of the configuration."""
    return [f"{section}.{key}" for section, cls in get_type_hints(Config).items() for key in get_type_hints(cls)]


def _convert(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"`{name}` is a section ([{name}]), got {_show(value)}")
        return from_dict(cast(type, hint), value, prefix=f"{name}.")
    if not _fits(hint, value):
        raise ConfigError(f"`{name}` must be {describe(hint)}, got {_show(value)}")
    return _coerce(hint, value)


def _fits(hint: Any, value: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(arg, value) for arg in args)
    if origin is Literal:
        return value in args and isinstance(value, type(args[0]))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        if args[-1] is Ellipsis:
            return all(_fits(args[0], item) for item in value)
        return len(value) == len(args) and all(_fits(arg, item) for arg, item in zip(args, value, strict=True))
    if origin is dict:
        return isinstance(value, Mapping)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _coerce(hint: Any, value: Any) -> Any:
    """Lists to tuples and integers to floats, where the field says so."""
    if hint is float:
        return float(value)
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return tuple(_coerce(inner, item) for item in value)
    return value


def describe(hint: Any) -> str:
    """A type as a user writes it in TOML."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(arg) for arg in args)
    if origin is tuple:
        count = "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
        return f"{count} of {describe(args[0])} values"
    if origin is dict:
        return "a table"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}.get(hint, str(hint))


def _show(value: Any) -> str:
    kind = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "table"}
    return f"{value!r} ({kind.get(type(value), type(value).__name__)})"


# --------------------------------------------------------------------------------------------- writing


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON values; unset (None) fields are left out, since TOML has no null."""
    table: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            table[item.name] = to_dict(value)
        elif value is not None:
            table[item.name] = list(value) if isinstance(value, tuple) else value
    return table


def to_toml(config: Config) -> str:
    """The effective configuration as TOML that `load` reads back to an equal object."""
    blocks = []
    for section, table in to_dict(config).items():
        blocks.append("\n".join([f"[{section}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]))
    return "\n\n".join(blocks) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        items = ((k, v) for k, v in value.items() if v is not None)  # a null of a config.json means "not set"
        return "{" + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{value!r} has no TOML form")
