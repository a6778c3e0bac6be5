"""The comparison of ranks: the description of a root, and the transfers that it issues in each step.

[Note: One description of everything]
What a rank sends follows from its units: their order, names, shapes, dtypes, caches, wires, checks, precision, mesh and
flags. If one rank has others, ranks wait for each other until a time-out, or add up what does not belong together. So
before the first transfer of a root, ranks compare one number that stands for all of this. Only if the numbers differ do
they exchange the descriptions, and each names the first difference. The description is read from the fields of the
objects themselves, so a new setting takes part by itself: plain values and dataclasses of them say what they are,
modules their classes, other units their names, and other objects nothing.

Islands may train different parameters, as partial updates do. So the trainability and the wire, which follows from it,
are compared within an island. Ranks may hold different parts of a DTensor, and cut them otherwise. So blocks and
layouts of DTensors are compared among ranks with equal parts. All the rest is compared over all ranks.

[Note: One program on all ranks]
A process group matches transfers by their order alone. If one rank calls unit a where another calls unit b of equal
shape, the transfers fit, and both ranks compute nonsense. So a root keeps a number that stands for all gathers and
reductions so far, with their units, and compares it over the ranks at the end of each backward, and of each forward
without gradients. Each rank sends 16 bytes to each other. It begins before the last reductions are awaited, and so it
costs no trip of its own where the host waits for these. Where the device waits, the host awaits the message before an
optimizer's step, or before the next forward. If the numbers differ, ranks exchange the names, and each raises the
first difference, before an optimizer has used the gradients.

Islands that train on their own compare among their own ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.groups import has_peers
from laconic.comm.journal import issue
from laconic.comm.messages import HostExchange, start_to_all
from laconic.comm.watch import waiting_for
from laconic.errors import RanksDifferError
from laconic.guard.reporting import by_cluster, some
from laconic.ragged.dtensor import DTensorShard
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.steps import OptimizerStep, before_step
from laconic.shard.bucket import Bucket, ManagedParameter

Description = dict[str, dict[str, str]]
"""For each unit or parameter its settings, by name."""

_OF_ISLAND, _OF_PART = "of the island", "of the part"
"""End the names of settings that islands, and ranks with other parts of DTensors, may have of their own."""
_OWN_OF_ISLANDS = ("wire",)
_OWN_OF_PARTS = ("blocks", "layout")
_REMEDY = "All ranks must build and shard one model, with equal settings"
_MOST_KEPT = 2_000  # names of a step
_WHAT = "the comparison of what ranks have issued"


def describe_units(units: Iterable[Any]) -> Description:
    """Describe the units of a root, in their order, with their buckets."""
    found: Description = {}
    for unit in units:
        place = unit.name if unit.name not in found else f"{unit.name} ({len(found)})"
        own = [bucket for bucket in unit.buckets if bucket.cluster is unit.cluster]
        settings = found[place] = {}
        for bucket in own:
            settings |= _of_parameters(bucket)
        has_parts = any(_dtensor_of(parameter) is not None for bucket in own for parameter in bucket.sharded)
        settings |= _settings({each.name: getattr(unit, each.name) for each in fields(unit)}, has_parts=has_parts)
        for number, bucket in enumerate(own):
            # no settings of a bucket: its unit's name, its parameters, which `_of_parameters` compares, and bytes
            hidden = ("unit_name", "sharded", "specs", "ledger")
            values = {name: value for name, value in vars(bucket).items() if name[0] != "_" and name not in hidden}
            shown = _settings(values, has_parts=has_parts)
            settings |= {f"bucket {number} {name}": value for name, value in shown.items()}
    return found


def num_parts(units: Iterable[Any]) -> int:
    """A number for the parts of DTensors that this rank holds; 0 if there are none."""
    parameters = [parameter for unit in units for bucket in unit.buckets for parameter in bucket.sharded]
    parts = [(each.offset, each.local_shape) for each in map(_dtensor_of, parameters) if each is not None]
    return zlib.crc32(repr(parts).encode()) if parts else 0


def compare(
    group: dist.ProcessGroup | None, call: str, description: Description, *, island: int = 0, parts: int = 0
) -> None:
    """Compare descriptions that all ranks of a group must have alike. Collective over it.

    `call` says for what. `island` and `parts` are equal for ranks that have the settings of islands and parts alike.

    Cost: a message of two numbers; if they differ, another one with the descriptions.

    Raises:
        RanksDifferError: they differ, or a rank makes another call; on all ranks, with the first difference.
    """
    if group is None or not has_peers(group):
        return
    ranks = RankGroup(group)
    digests = [_digest(_parted(description, is_own=is_own)) for is_own in (False, True)]
    message = [call, [island, parts], *digests]
    by_rank: list[Any] = ranks.gather(message)
    numbers = dist.get_process_group_ranks(group)
    are_ours = (isinstance(each, list) and len(each) == len(message) for each in by_rank)
    calls = [each[0] if is_ours else "another collective call" for each, is_ours in zip(by_rank, are_ours, strict=True)]
    for place, theirs in enumerate(calls):
        if theirs != calls[0] or theirs == "another collective call":
            raise RanksDifferError(
                f"rank {numbers[place]} differs from rank {numbers[0]}: it runs {theirs} where rank {numbers[0]} runs "
                f"{calls[0]}. {_REMEDY}"
            )
    bases = [_base_of(theirs, by_rank) for theirs in by_rank]
    odd = [place for place, base in enumerate(bases) if by_rank[place][2:] != by_rank[base][2:]]
    if not odd:
        return
    descriptions = ranks.gather(description)
    reasons = []
    for place in odd:
        base = bases[place]
        expected, found = descriptions[base], descriptions[place]
        if by_rank[place][1] != by_rank[base][1]:  # each may have settings of its own
            expected, found = (_parted(each, is_own=False) for each in (expected, found))
        difference = first_difference(expected, found, f"rank {numbers[base]}")
        reasons.append(f"rank {numbers[place]} differs from rank {numbers[base]}: {difference}")
    raise RanksDifferError(f"{_first_of(reasons)}. {_REMEDY}")


def compare_broadcast(module: nn.Module, managed: Sequence[ManagedParameter]) -> None:
    """Compare the parameters to which `fully_shard` is about to copy the first rank's values. Collective.

    Raises:
        RanksDifferError: see `compare`.
    """
    for cluster, members in by_cluster(managed).items():
        described = {
            item.name: {"shape": str(tuple(item.local.shape)), "dtype": str(item.local.dtype)} for item in members
        }
        compare(cluster.all_flag_group, f"fully_shard(broadcast=True) of {type(module).__name__}", described)


def first_difference(base: Description, other: Description, base_name: str) -> str:
    """Name the first unit in which two descriptions differ, and how; "" if they are equal."""
    units, other_units = list(base), list(other)
    for place, unit in enumerate(units):
        if unit not in other:
            return f"it has no {unit}, which {base_name} has ({len(other_units)} here, {len(units)} there)"
        for name, value in base[unit].items():
            theirs = other[unit].get(name)
            if theirs != value:
                return f"{unit} has {name} {theirs or 'missing'} here, and {value} on {base_name}"
        if extra := other[unit].keys() - base[unit].keys():
            return f"{unit} has {min(extra)} {other[unit][min(extra)]} here, and none on {base_name}"
        if list(other[unit]) != list(base[unit]):
            here, there = next((a, b) for a, b in zip(other[unit], base[unit], strict=True) if a != b)
            return f"{unit} has {here} where {base_name} has {there}: the order differs"
        if other_units[place : place + 1] != [unit] and set(units) == set(other_units):
            return f"{other_units[place]} comes where {base_name} has {unit}: the order of the units differs"
    extra_units = [unit for unit in other_units if unit not in base]
    if extra_units:
        return f"it has {extra_units[0]}, which {base_name} has not ({len(other_units)} here, {len(units)} there)"
    return ""


def _base_of(message: Any, by_rank: Sequence[Any]) -> int:
    """The rank with which a rank is compared: the first with its island and parts that is as rank 0, or rank 0."""
    first = by_rank[0]
    if message[2] != first[2]:
        return 0
    return next(place for place, each in enumerate(by_rank) if each[1:3] == [message[1], first[2]])


def _parted(description: Description, *, is_own: bool) -> Description:
    return {
        unit: {name: value for name, value in settings.items() if name.endswith((_OF_ISLAND, _OF_PART)) == is_own}
        for unit, settings in description.items()
    }


def _digest(value: Description) -> int:
    return zlib.crc32(json.dumps(list(value.items())).encode())


def _of_parameters(bucket: Bucket) -> dict[str, str]:
    """The shapes and dtypes of parameters by name, and whether they are trained."""
    found = {}
    for slot, parameter in zip(bucket.layout.slots, bucket.sharded, strict=True):
        dtensor = _dtensor_of(parameter)
        shape = tuple(slot.shape) if dtensor is None else f"{dtensor.shape} {dtensor.placements}"
        found[slot.name] = f"{shape} {bucket.dtype}"
        found[f"{slot.name} {_OF_ISLAND}"] = "trained" if parameter.requires_grad else "frozen"
    return found


def _dtensor_of(parameter: Any) -> DTensorShard | None:
    spec: RaggedSpec = parameter.spec
    return spec.dtensor


def _settings(values: Mapping[str, Any], *, has_parts: bool) -> dict[str, str]:
    """The settings of an object by name; those that say nothing are left out."""
    own = dict.fromkeys(_OWN_OF_ISLANDS, f" {_OF_ISLAND}") | dict.fromkeys(_OWN_OF_PARTS, f" {_OF_PART}" * has_parts)
    found = {}
    for name, value in values.items():
        shown = _shown(value)
        if shown is not None:
            found[f"{name}{own.get(name, '')}"] = shown
    return found


def _shown(value: Any) -> str | None:
    """A value as text that is equal on all ranks; None for an object that says nothing."""
    if isinstance(value, (bool, int, float, str, torch.dtype, Enum, type(None))):
        return str(value)
    if isinstance(value, Cluster):
        shape = f"{value.num_islands} x {value.num_nodes} x {value.num_local}"
        return f"{shape} (islands x nodes x local ranks) on {value.device_type}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if type(value).__name__ == "Unit":
        return str(value.name)
    if is_dataclass(value) and not isinstance(value, type) and type(value).__eq__ is not object.__eq__:
        return type(value).__name__ + _joined(
            f"{each.name}={_shown(getattr(value, each.name))}" for each in fields(value)
        )
    if isinstance(value, Mapping):
        return _joined(f"{key}: {_shown(each)}" for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return _joined(sorted(str(_shown(each)) for each in value))
    if isinstance(value, Sequence):
        shown = [_shown(each) for each in value]
        return None if any(each is None for each in shown) else _joined(str(each) for each in shown)
    return None


def _joined(parts: Iterable[str]) -> str:
    return f"({', '.join(parts)})"


class IssuedProgram:
    """The gathers and reductions that one root has issued: [Note: One program on all ranks]."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._count = self._compared = self._agreed = 0
        """The transfers issued, those that the ranks compare or have compared, and those on which they agree."""
        self._digest = 0
        self._names: list[str] = []  # since the ranks last agreed
        self._exchange: HostExchange | None = None

    def note(self, name: str) -> None:
        """Note what this rank issues next, such as "the gather of layers.0"."""
        self._count += 1
        self._digest = zlib.crc32(name.encode(), self._digest)
        if len(self._names) < _MOST_KEPT:
            self._names.append(name)

    def start_comparison(self, *, diverges: bool) -> None:
        """Begin to compare over the ranks, if anything was issued. With `diverges`, over those of this island."""
        self.settle()
        self._group = self._cluster.flag_group if diverges else self._cluster.all_flag_group
        if self._group is None or self._count == self._agreed:
            return
        self._compared = self._count
        own = torch.tensor([self._count, self._digest], dtype=torch.int64)
        self._sent = own.repeat(self._group.size(), 1)
        self._arriving = self._sent.clone()
        self._ticket = issue(self._group, _WHAT)
        with waiting_for(_WHAT, self._ticket):
            self._exchange = start_to_all(self._group, self._ticket, self._arriving, self._sent)
        _unsettled.add(self)

    def settle(self) -> None:
        """Finish the comparison that has begun, if any.

        Raises:
            RanksDifferError: ranks have issued different things; on all of them.
        """
        _unsettled.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        with waiting_for(_WHAT, self._ticket):
            exchange.wait()
        first, self._agreed = self._agreed, self._compared
        names, self._names = self._names[: self._agreed - first], self._names[self._agreed - first :]
        if bool((self._arriving == self._arriving[0]).all()):
            return
        assert self._group is not None
        by_rank = RankGroup(self._group).gather(names)
        self.forget()
        raise RanksDifferError(_described(by_rank, dist.get_process_group_ranks(self._group), first))

    def forget(self) -> None:
        """Begin anew after a forward or backward that raised."""
        self._exchange = None
        self._names, self._digest = [], 0
        self._count = self._compared = self._agreed = 0
        _unsettled.discard(self)


def _described(by_rank: Sequence[Sequence[str]], ranks: Sequence[int], first: int) -> str:
    reasons = []
    for rank, names in zip(ranks, by_rank, strict=True):
        base = by_rank[0]
        place = next((i for i, pair in enumerate(zip(names, base, strict=False)) if pair[0] != pair[1]), None)
        if place is None and len(names) != len(base):
            place = min(len(names), len(base))
        if place is not None:
            here, there = (each[place] if place < len(each) else "nothing more" for each in (names, base))
            reasons.append(
                f"rank {rank} differs from rank {ranks[0]} at transfer {first + place + 1}, number {place + 1} since "
                f"they last agreed: it issued {here} where rank {ranks[0]} issued {there}"
            )
    return (
        f"{_first_of(reasons)}. So weights and gradients of different units were mixed: all ranks "
        "must call the same units in the same order. Go on from the last checkpoint"
    )


def _first_of(reasons: Sequence[str]) -> str:
    return some(reasons, most=4, joint="; ", more=" (and {} more ranks)")


_unsettled: WeakSet[IssuedProgram] = WeakSet()


@before_step
def _settle_all(_: OptimizerStep) -> None:
    for program in list(_unsettled):
        program.settle()
