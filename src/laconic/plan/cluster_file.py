"""The cluster file: a `ClusterSpec` that is read from TOML, strictly, with a table's figures for what it leaves out.

[Note: Figures of the table]
A file may name its `device`, its `network` (`10 GbE`, `8 x InfiniBand NDR`), its `local_network` and its `host_link`. A
figure that the file gives itself counts. A figure that it leaves out is the table's peak times the share of the peak
that is usual, which the table states as well. `to_toml` writes such a figure with the share and the source beside it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from laconic.config import ConfigError, parse_toml
from laconic.config.section import refuse_absurd
from laconic.plan.cluster_spec import DTYPES, ClusterSpec, refuse_missing
from laconic.plan.known import Device, Network, find_device, find_network
from laconic.plan.units import Unit, expected, format_quantity, parse_quantity, unit_for
from laconic.policy import shown

_T = TypeVar("_T")
_Links = tuple[int, Network]
"""Equal networks side by side."""

GIVEN = "given"
"""The source of a figure that the file has."""
_NAMES = ("device", "network")
_LOOKED_UP = ("local_network", "host_link")
"""Keys of the file that stand for figures, and that the spec does not keep."""
_COUNTS = ("nodes", "ranks_per_node", "ranks_per_host_link")
_FLOPS = "device_flops_per_s"
_KEYS = [*(field.name for field in dataclasses.fields(ClusterSpec) if field.name != "sources"), *_LOOKED_UP]
_OTHERS = {
    "gpus_per_node": "ranks_per_node",
    "nproc_per_node": "ranks_per_node",
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "gpu": "device",
    "bandwidth": "wire_bits_per_s",
    "latency": "wire_latency_s",
}
"""Keys of other tools, and ours for the same."""
_STANDS_FOR = {
    "device": ("device_memory_bytes", "device_memory_bytes_per_s", _FLOPS),
    "network": ("wire_bits_per_s", "wire_latency_s"),
    "local_network": ("local_bytes_per_s", "local_latency_s"),
    "host_link": ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s"),
}
"""The figures for which each name can stand."""


def load_cluster(path: str | Path) -> ClusterSpec:
    """Read a cluster from a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a wrong key or value. The message names the file, the
            key, the value and the expectation.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise ConfigError(f"cannot read the cluster file {str(path)!r}: {error}") from error
    try:
        return parse_cluster(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_cluster(text: str) -> ClusterSpec:
    """Return the cluster that a TOML text describes: [Note: Figures of the table].

    Raises:
        ConfigError: the text is not TOML, or has a wrong key or value.
    """
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"not valid TOML: {error}") from error
    return cluster_from_dict(table)


def cluster_from_dict(table: Mapping[str, Any]) -> ClusterSpec:
    """Make a cluster from the plain values of a cluster file.

    Raises:
        ConfigError: a key is unknown, a figure is missing, or a value has the wrong type or makes no sense.
    """
    given: dict[str, Any] = {}
    for key, value in table.items():
        refuse_absurd(key, "a key")
        if key not in _KEYS:
            nearest = _OTHERS.get(key.lower()) or difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key `{key}`; the nearest valid key is `{nearest}` (valid: {', '.join(_KEYS)})")
        refuse_absurd(value, key)
        given[key] = _converted(key, value)
    sources = {key: GIVEN for key in given if key not in (_FLOPS, *_LOOKED_UP, *_NAMES)}
    flops: dict[str, float] = {}
    for key, exact, source in _table_figures(given):
        figure = float(f"{exact:.6g}") if isinstance(exact, float) else exact
        if key.startswith(f"{_FLOPS}."):
            flops[key.removeprefix(f"{_FLOPS}.")], sources[key] = figure, source
        elif key not in given:
            given[key], sources[key] = figure, source
    for dtype, rate in given.get(_FLOPS, {}).items():
        flops[dtype], sources[f"{_FLOPS}.{dtype}"] = rate, GIVEN
    if flops:
        given[_FLOPS] = flops
    for key in _LOOKED_UP:
        given.pop(key, None)
    refuse_missing(given)
    return ClusterSpec(**given, sources=sources)


def to_toml(spec: ClusterSpec) -> str:
    """Return the cluster file of `spec`. If `spec` came from a file, `parse_cluster` makes an equal object of the text.

    Beside each figure a comment has the figure in units for people, and the figure's source.
    """
    lines = ['# A cluster, for `laconic plan`. Rates and sizes are in SI units; texts such as "25 GB/s" work as well.']
    values = {key: getattr(spec, key) for key in _KEYS if hasattr(spec, key)}
    for key, value in values.items():
        if value is not None and key != _FLOPS:
            lines.append(_line(key, value, unit_for(key), spec.sources.get(key)))
    lines += ["", f"[{_FLOPS}]"]
    for dtype, rate in spec.device_flops_per_s.items():
        lines.append(_line(dtype, rate, "FLOP/s", spec.sources.get(f"{_FLOPS}.{dtype}")))
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, unit: Unit, source: str | None) -> str:
    comments = [format_quantity(value, unit)] if unit else []
    comments += [source] if source else []
    text = tomli_w.dumps({key: value}).rstrip("\n")
    if isinstance(value, float):  # tomli_w writes 15 zeros where this has an exponent
        short = f"{value:.6g}"
        text = f"{key} = {short if float(short) == value else repr(value)}"
    return f"{text}  # {'; '.join(comments)}" if comments else text


def _converted(key: str, value: Any) -> Any:
    """A value of the file as the spec keeps it."""
    if key in (*_NAMES, *_LOOKED_UP):
        if not isinstance(value, str):
            raise ConfigError(f"`{key}` must be a text, got {shown(value)}")
        return value
    if key in _COUNTS:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"`{key}` must be an integer, got {shown(value)}")
        return value
    if key == _FLOPS:
        return dict(_converted_flops(value))
    number = _number(key, value)
    return round(number) if unit_for(key) == "B" and number < 2**63 else number


def _converted_flops(table: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"`{_FLOPS}` is a section ([{_FLOPS}]) of rates by dtype, got {shown(table)}")
    for dtype, value in table.items():
        if dtype not in DTYPES:
            nearest = difflib.get_close_matches(dtype, DTYPES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key `{_FLOPS}.{dtype}`; the nearest is `{nearest}` (of {', '.join(DTYPES)})")
        yield dtype, _number(f"{_FLOPS}.{dtype}", value, _FLOPS)


def _number(name: str, value: Any, key: str | None = None) -> float:
    unit = unit_for(key or name)
    if isinstance(value, str) and unit:
        try:
            return parse_quantity(value, unit)
        except ValueError as error:
            raise ConfigError(f"{name} = {shown(value)} {error}") from error
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} = {shown(value)} must be {expected(unit)}")
    return float(value)


def _table_figures(given: dict[str, Any]) -> Iterator[tuple[str, float, str]]:
    """The figures that the names in a file stand for, each with its key and its source.

    A name that the table has is written in `given` as the table writes it.
    """
    device: Device | None = _found("device", given.get("device"), find_device, given)
    wire: _Links | None = _found("network", given.get("network"), find_network, given)
    if device is not None:
        given["device"] = device.name
        yield from _device_figures(device)
        given.setdefault("host_link", device.host_link)
        if device.local is not None:
            given.setdefault("local_network", device.local)
    host: _Links | None = _found("host_link", given.get("host_link"), find_network, given)
    if host is not None:
        rate, source = _usual("B/s", host)
        yield "host_to_device_bytes_per_s", rate, source
        yield "device_to_host_bytes_per_s", rate, source
    local: _Links | None = _found("local_network", given.get("local_network"), find_network, given)
    if local is not None:
        yield "local_bytes_per_s", *_usual("B/s", local)
        yield "local_latency_s", local[1].latency_s, f"table: {local[1].name}"
    if wire is not None:
        given["network"] = _name_of(wire)
        yield "wire_bits_per_s", *_usual("bit/s", wire)
        yield "wire_latency_s", wire[1].latency_s, f"table: {wire[1].name}"
        yield "wire_header_factor", wire[1].header_factor, f"table: {wire[1].name}"


def _device_figures(device: Device) -> Iterator[tuple[str, float, str]]:
    yield "device_memory_bytes", round(device.memory_bytes), f"table: what a process can have on {device.name}"
    whose = f"{device.name}; {device.source}"
    peak, efficiency = device.memory_bytes_per_s, device.memory_efficiency
    yield "device_memory_bytes_per_s", efficiency * peak, _share("B/s", efficiency, peak, whose)
    efficiency = device.matmul_efficiency
    for dtype, peak in device.peak_flops_per_s.items():
        yield f"{_FLOPS}.{dtype}", efficiency * peak, _share("FLOP/s", efficiency, peak, whose)
    if device.attention_efficiency is not None:
        share = device.attention_efficiency / efficiency
        yield "device_attention_share", share, f"table: {device.attention_efficiency:.0%} of the peak ({device.name})"


def _usual(unit: Unit, links: _Links) -> tuple[float, str]:
    """The rate that links of the table usually reach together, and its source."""
    count, network = links
    peak = count * network.bits_per_s / (8 if unit == "B/s" else 1)
    source = _share(unit, network.efficiency, peak, f"{_name_of(links)}; {network.source}")
    return network.efficiency * peak, source


def _share(unit: Unit, efficiency: float, peak: float, whose: str) -> str:
    return f"table: {efficiency:.0%} of {format_quantity(peak, unit)} ({whose})"


def _name_of(links: _Links) -> str:
    count, network = links
    return f"{count} x {network.name}" if count > 1 else network.name


def _found(key: str, words: str | None, find: Callable[[str], _T], given: Mapping[str, Any]) -> _T | None:
    """The entry of a table that a key names, or None if the file names none.

    A file with all the figures for which the name could stand may have any name, as a measured file does.
    """
    if words is None:
        return None
    try:
        return find(words)
    except ValueError as error:
        if set(_STANDS_FOR[key]) <= set(given):
            return None
        raise ConfigError(f"{key} = {shown(words)} {error}") from error
