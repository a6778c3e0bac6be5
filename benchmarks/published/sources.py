"""The files of published measurements, and what the planner needs of them.

[Note: A published file]
A file has one source: its title, its link, its day, and what it leaves open and was assumed. `[cluster]` has the keys
of a cluster file, `[job]` those of a job file, and `[models]` the configurations of its models by name; a row may also
name a model of the planner's table. A `[[row]]` is a measurement: its strategy, the figure and the memory exactly as
published, a few words of the source, and what differs from the file's cluster and job. `[reasons]` has texts that
several rows give by their names.

No figure of a file is fitted. Machines are named, and the planner's tables have their peaks and the usual shares of
these. Ethernet with RDMA is named as InfiniBand of the same bits. What no table has is a data sheet's peak times the
share of the entry of its kind: 0.9 for device memory, 0.97 for TCP, 0.8 inside a node.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from laconic.config import Config, from_dict
from laconic.plan.cluster_file import cluster_from_dict
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.known import models
from laconic.plan.units import parse_quantity

FOLDER = Path(__file__).parent
Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The size of an optimizer step of all ranks."""

    rows: int
    tokens: int
    ranks: int
    flop: float
    """The FLOPs that the source counts for a step of one rank; 0 if it counts none."""


UNITS: Mapping[str, Callable[[float, Step], float]] = {
    "s/step": lambda value, step: value,
    "tokens/s": lambda value, step: step.tokens / value,
    "tokens/s/GPU": lambda value, step: step.tokens / step.ranks / value,
    "samples/s": lambda value, step: step.rows / value,
    "s/1024 samples": lambda value, step: value * step.rows / 1024,
    "TFLOP/s/GPU": lambda value, step: step.flop / (value * 1e12),
}
"""The units of published figures, and the seconds of a step that a figure means."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of a file, made whole."""

    source: str
    """The name of its file."""
    name: str
    machines: str
    """The cluster in words; rows with the same words are of one cluster."""
    config: Config
    cluster: ClusterSpec
    strategy: str
    """A name of the registry."""
    published: str
    """The figure as the source has it, such as `10,471 tokens/s`; one of `UNITS`."""
    seconds: float
    """The same for one optimizer step."""
    memory: str
    """The memory of a device as the source has it; empty if it has none."""
    quote: str
    url: str
    reason: str
    """Why the prediction is off by more than a quarter."""

    @property
    def key(self) -> str:
        """A name among all measurements."""
        return f"{self.source}: {self.name}"

    @property
    def memory_bytes(self) -> float | None:
        """The published memory, or None."""
        return parse_quantity(self.memory, "B") if self.memory else None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file."""

    name: str
    title: str
    url: str
    date: str
    assumed: str
    """The facts that the source leaves open, and the value that each was given."""
    rows: tuple[Measurement, ...]


def sources() -> dict[str, Source]:
    """All files, by name."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.toml"))}


def measurements() -> dict[str, Measurement]:
    """All measurements, by key."""
    return {row.key: row for source in sources().values() for row in source.rows}


@cache
def load(path: Path) -> Source:
    """Read a file.

    Raises:
        ValueError: a key is unknown or missing, a unit is unknown, or two rows have one name.
        ConfigError: its job or its cluster is none.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = {key: table.pop(key, {}) for key in ("cluster", "job", "models", "reasons")}
    rows, machines = table.pop("row"), table.pop("machines", "")
    try:
        found = tuple(
            _measurement(path.stem, {"machines": machines, "url": table["url"], **row}, shared) for row in rows
        )
        source = Source(name=path.stem, rows=found, **table)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if len({row.name for row in found}) < len(found):
        raise ValueError(f"{path}: two rows have one name")
    return source


def _measurement(source: str, row: dict[str, Any], shared: Mapping[str, Table]) -> Measurement:
    job = dict(merged(shared["job"], row.pop("job", {})))
    name, flop = row.pop("model"), row.pop("flop", 0.0)
    model = shared["models"][name] if name in shared["models"] else models()[name].config
    config = from_dict(Config, merged(job, {"model": {"config": dict(model)}}))
    cluster = cluster_from_dict(merged(shared["cluster"], row.pop("cluster", {})))
    rows = cluster.ranks * config.train.micro_batch_size * config.train.accumulation
    step = Step(rows=rows, tokens=rows * config.data.sequence_length, ranks=cluster.ranks, flop=flop)
    value, unit = row["published"].split(" ", 1)
    reason = row.pop("reason", "")
    return Measurement(
        source=source, config=config, cluster=cluster, seconds=UNITS[unit](float(value.replace(",", "")), step),
        memory=row.pop("memory", ""), reason=shared["reasons"].get(reason, reason), **row,
    )  # fmt: skip


def merged(table: Table, other: Table) -> dict[str, Any]:
    """The one table with the values of the other; tables in both are merged, too."""
    both = {key: value for key, value in other.items() if isinstance(value, Mapping) and key in table}
    return {**table, **other, **{key: merged(table[key], value) for key, value in both.items()}}


def pairs(rows: Mapping[str, Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    """The pairs of measurements of one model in one source, each once."""
    found = list(rows.values())
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            if one.source == other.source and one.config.model.config == other.config.model.config:
                yield one, other
