"""The shipped tables of well-known devices, networks and models, `devices.toml`, ..., with their sources."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from laconic.plan.units import parse_quantity, unit_for

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of the table: peaks from its maker's data sheet, and the shares of them that are usual."""

    name: str
    also: tuple[str, ...] = ()
    """Other words for it."""
    torch_name: str
    """A regular expression for the name that torch gives it."""
    memory_bytes: float
    """The memory that a process can have, which is less than the number in the name."""
    memory_bytes_per_s: float
    memory_efficiency: float
    """The share of the memory's peak rate that a large copy reaches."""
    peak_flops_per_s: Mapping[str, float]
    """By dtype, without sparsity."""
    matmul_efficiency: float
    """The share of the peak that a large matrix product of random values reaches."""
    attention_efficiency: float | None = None
    """The share of the peak that fused attention reaches. Default: that of products."""
    local: str | None = None
    """The network between the devices of a node, a name of the table; None if machines differ."""
    host_link: str
    """The link between a device and its host, by its name in the table."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network between machines, or a connection inside one."""

    name: str
    bits_per_s: float
    """Of one direction, headers included. Both directions work at once."""
    efficiency: float
    """The share of the rate that collectives of large tensors reach."""
    latency_s: float
    """The duration of the smallest collective of two ranks."""
    header_factor: float = 1.0
    """The bytes that an interface counts for each byte of payload."""
    source: str


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A language model that somebody has published."""

    name: str
    config: Mapping[str, Any]
    """The configuration for transformers."""
    billions: float
    """The number of parameters, in billions, as it was published."""
    source: str


@cache
def devices() -> Mapping[str, Device]:
    """All devices of the table, by name."""
    return {name: Device(name=name, **values) for name, values in _table("devices.toml").items()}


@cache
def networks() -> Mapping[str, Network]:
    """All networks of the table, by name."""
    return {name: Network(name=name, **values) for name, values in _table("networks.toml").items()}


@cache
def models() -> Mapping[str, PublishedModel]:
    """All models of the table, by name."""
    entries = tomllib.loads((_FOLDER / "models.toml").read_text(encoding="utf-8"))
    return {name: PublishedModel(name=name, **values) for name, values in entries.items()}


def find_device(words: str) -> Device:
    """Return the device of that name. Case, spaces and hyphens do not matter.

    Raises:
        ValueError: the table has no such device. The message has the nearest name.
    """
    also = {other: device.name for device in devices().values() for other in device.also}
    return devices()[_find([*devices()], also, words)]


def find_network(words: str) -> tuple[int, Network]:
    """Return the number of networks and the network that words such as `10 GbE` or `8 x InfiniBand NDR` mean.

    Raises:
        ValueError: the table has no such network. The message has the nearest name.
    """
    match = re.fullmatch(r"\s*([1-9][0-9]{0,3})\s*x\s+(.+)", words)
    count, name = (int(match[1]), match[2]) if match else (1, words)
    return count, networks()[_find([*networks()], {}, name)]


def device_named(torch_name: str) -> Device | None:
    """Return the device to which torch gives this name, for example `NVIDIA A100-SXM4-80GB`; None if it is unknown."""
    return next((device for device in devices().values() if re.search(device.torch_name, torch_name)), None)


def _find(names: Sequence[str], also: Mapping[str, str], words: str) -> str:
    """The one of `names` that the words mean; `also` has other words for some."""
    plain = {_plain(name): name for name in names} | {_plain(other): name for other, name in also.items()}
    wanted = _plain(words)
    if wanted not in plain:
        alike = [name for name in plain if wanted and name.startswith(wanted)]
        nearest = (alike or difflib.get_close_matches(wanted, plain, n=1, cutoff=0.0))[0]
        raise ValueError(
            f"is not in the table; the nearest is {plain[nearest]!r} (in the table: {', '.join(names)}). For something "
            "else, leave it out and give the figures themselves; `laconic doctor --out` writes those of your machines"
        )
    return plain[wanted]


def _plain(words: str) -> str:
    return re.sub(r"[\s_-]", "", words).lower()


def _table(file: str) -> dict[str, dict[str, Any]]:
    entries = tomllib.loads((_FOLDER / file).read_text(encoding="utf-8"))
    return {name: {key: _plain_value(key, value) for key, value in entry.items()} for name, entry in entries.items()}


def _plain_value(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: parse_quantity(item, unit_for(key)) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(value)
    return parse_quantity(value, unit_for(key)) if isinstance(value, str) and unit_for(key) else value
