"""Every strategy, registered once: what `train`, `compare` and `plan` know about it, in one record.

[Note: Registered strategies]
A record is data. It imports no torch, so that a job with a wrong name is refused at once, and it names code as
"module:function", which is imported when it is needed. The modules of the packages `SOURCES` have the records: each has
a tuple `STRATEGIES`, and a new one is found without being listed anywhere. A package that is not installed adds
nothing: laconic's wheel has no `contestants`.

A record whose name is also its value of shard.strategy is a way to train of its own: it says who shards the model and
takes the steps. The others are variants of such a record, with more keys: "host" is "laconic" with cache = "host".
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

SOURCES = ("laconic.contestants.known", "laconic.strategies.known")
"""The packages whose modules have records."""
AUTO = "auto"
"""The value of shard.strategy for which the planner chooses one."""
_PLACES = {"PyTorch": 0, "DeepSpeed": 1, "laconic": 2}
"""The order in which the strategies of makers are listed; other makers follow."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A key of the job, or a figure of the launch, of which a strategy takes some values only."""

    key: str
    """A "section.key" of the job; or "launch.ranks_per_node" or "launch.device", a type; None if unknown."""
    holds: Callable[[Any], bool]
    """Whether the strategy takes a value."""
    message: str
    """What is wrong and what to do. "{value!r}" and "{strategy!r}" stand for the job's; "{toml}" is the value as in a
    file."""

    @classmethod
    def only(cls, key: str, *values: Any, message: str) -> Limit:
        """A strategy takes no other values of a key."""
        return cls(key=key, holds=lambda value: value in values, message=message)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to run a training job: [Note: Registered strategies].

    Raises: ValueError if a comparison could not show it.
    """

    name: str
    also: tuple[str, ...] = ()
    """Other names for it."""
    label: str
    """Its name for people."""
    note: str
    """A line for readers of a report, and for the list in docs/compare.md."""
    source: str = ""
    """Where its algorithm is published."""
    maker: str = "laconic"
    """Whose strategy it is."""
    colour: str = ""
    """Its colour in pictures. Baselines are grey, blue and green, laconic's own strategies orange and brown. Lightness
    differs, too, for colour-blind readers."""
    shard: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Its keys in the section `[shard]`."""
    sync: Mapping[str, Any] | None = None
    """Its keys in the section `[sync]`, over the job's own; None for ranks that sync in every step."""
    schedule: Mapping[str, Any] | None = None
    """Its keys in the section `[schedule]`, over the job's own; None for ranks that run at the same time."""
    pipeline: Mapping[str, Any] | None = None
    """Its keys in the section `[pipeline]`, over the job's own; None for ranks that hold all layers."""
    policy: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Keys of the sharding policy that it sets itself, whatever the job says."""
    takes_checks: bool = False
    """Whether ranks may compare checksums and repeat each other's work: the keys of `Checks` and `Audits`."""
    inexact: str = ""
    """The difference from ZeRO-3's training, and the measured cost in quality; empty if both train the same."""
    package: str | None = None
    """The package that it needs beside laconic, which is also the name of the extra that installs it."""
    limits: tuple[Limit, ...] = ()
    """What it does not take; `check_job` refuses the rest."""
    on_engine: bool = False
    """Whether laconic's engine shards the model."""
    reduces_always: bool = False
    """Whether every micro-batch reduces its gradients, and not the last of a step alone. Replicas of HSDP agree in the
    last."""
    saves: bool = True
    """Whether its runs write checkpoints. One that writes none is for comparisons, and is never recommended."""
    stepper: str = "laconic.strategies.simultaneous:Simultaneous"
    """Makes the `Stepper` of a rank, as "module:class"."""
    parallelize: str = ""
    """Shards the model for that stepper: see `laconic.strategies.parallelize`."""
    predict: str = ""
    """Makes the planner's program of it: see `laconic.plan.rehearsed.RehearsedStep`."""
    code: str = ""
    """A line of a script that trains so. "{nodes}" and "{local}" stand for the machines and the ranks of each,
    "{rests}" for the cache and the wire, and a key of [sync] or [pipeline] for its value."""
    in_compare: bool = True
    """Whether `laconic compare` runs it."""
    in_plan: bool = True
    """Whether `laconic plan` lists it."""

    def __post_init__(self) -> None:
        if self.in_compare and not self.colour:
            raise ValueError(f"strategy {self.name!r} is compared, and has no colour; give it one, or in_compare=False")

    def variant(self, **changes: Any) -> Strategy:
        """The same way to train with other fields; keys in `shard` are added to this record's."""
        shard = {**self.shard, **changes.pop("shard", {})}
        return dataclasses.replace(self, shard=shard, **changes)

    @property
    def is_way_to_train(self) -> bool:
        """Whether the name is a value of shard.strategy."""
        return self.shard.get("strategy") == self.name

    @property
    def is_own(self) -> bool:
        """Whether it is laconic's. The others are peers, to compare with."""
        return self.maker == "laconic"

    @property
    def has_islands(self) -> bool:
        """Whether machines sync now and then. The others sync in every step."""
        return self.sync is not None

    @property
    def is_installed(self) -> bool:
        """Whether `package` can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def problem(self, section: str, values: Mapping[str, Any]) -> str | None:
        """The first limit on keys of `section` that `values` do not keep, in words."""
        for limit in self.limits:
            where, _, key = limit.key.partition(".")
            if where == section and not limit.holds(value := values[key]):
                toml = str(value).lower() if isinstance(value, bool) else repr(value)
                return limit.message.format(value=value, toml=toml, strategy=self.shard.get("strategy", self.name))
        return None


@cache
def strategies() -> Mapping[str, Strategy]:
    """All strategies by name, in the order in which they are listed: peers before laconic's, islands last.

    Raises:
        ValueError: two have one name.
    """
    found = [each for module in _modules() for each in module.STRATEGIES]
    found.sort(key=lambda each: (each.schedule is not None, each.has_islands, _PLACES.get(each.maker, len(_PLACES))))
    by_name = {each.name: each for each in found}
    if len(by_name) < len(found):
        raise ValueError(f"two strategies have one name, among {', '.join(each.name for each in found)}")
    return MappingProxyType(by_name)


def canonical(name: str) -> str:
    """The name of the strategy that has `name` as another name; otherwise `name`."""
    return next((each.name for each in strategies().values() if name in each.also), name)


def named(name: str) -> Strategy:
    """The strategy with this name.

    Raises:
        KeyError: there is none.
    """
    return strategies()[canonical(name)]


def unknown(name: str, among: Iterable[str]) -> str:
    """What to say about a name that is not among these."""
    text = f"strategy {name!r} is not known; there are {', '.join(among)}"
    if all(_is_there(source) for source in SOURCES):
        return text
    return (
        f"{text}. Those of DeepSpeed and torchft are a distribution of their own: pip install ./contestants in a clone"
    )


def ways_to_train() -> tuple[str, ...]:
    """The values of shard.strategy."""
    return ("laconic", *(name for name, each in strategies().items() if each.is_way_to_train and name != "laconic"))


def load(path: str) -> Any:
    """Import what "module:name" says."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _modules() -> list[Any]:
    modules = []
    for source in SOURCES:
        if _is_there(source):
            package = importlib.import_module(source)
            names = sorted(found.name for found in pkgutil.iter_modules(package.__path__))
            modules += [importlib.import_module(f"{source}.{name}") for name in names]
    return modules


def _is_there(source: str) -> bool:
    return importlib.util.find_spec(source.rpartition(".")[0]) is not None
