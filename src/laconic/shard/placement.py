"""Where each unit's weights and gradients rest between their uses, chosen by seconds a byte: `cache="auto"`.

[Note: Placement]
A unit's weights may rest nowhere, as a node shard in host memory or on the device, or whole on the rank; its gradients
may wait between micro-batches as sums of the node, or whole on the rank. Each choice takes memory and saves transfers:

| weights rest | take | a step gathers across nodes | inside the node | copies |
|---|---|---|---|---|
| nowhere | nothing | at each use | at each use | |
| as node shard on the host | a node shard there | when they change | at each use | at each use |
| as node shard on the device | a node shard | when they change | at each use | |
| whole on the rank | all of them | when they change | when they change | |

The first step shows how often each unit is used and how many micro-batches there are. The ranks measure how long a
transfer takes on each level. Then the choice is a knapsack: of each unit one of up to eight placements, all within so
many bytes of device memory and of host memory, such that the transfers that are saved take the most seconds. Seconds of
different lanes count alike, though some of them hide behind compute: which of them do, only a rehearsal of the whole
step knows, and where all hide, each choice is as good.

[Note: A good set]
The set is made step by step: from the placements that take least, the step that saves most seconds for each byte comes
first, as long as it fits. A large step that comes late may find no room, though it saves more than all before it. So
the set is made again with each placement of each unit given beforehand, once for units that are alike, and the best of
these sets is taken, as Sahni (JACM 22(1), 1975) does with single items. In the tests, sets of up to 24 units save 0.95
of what the best ones do, or more, and most save all of that.

[Note: What a choice takes]
The memory that counts is that of the fullest moment, beside a step in which nothing rests. There some weights are whole
in any case: those of the root, which is around all others, and of two neighbours that take turns. If all weights of a
kind rest whole, the passing ones need no room besides, and the ledger of the first step says how much that is. While
one unit of the kind still takes turns, all of that room stays. So four sets are looked for, in which those around
others are all whole or not, and the others as well, and the best of the four is taken. A frozen shard that has a copy
in what rests goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from laconic.comm.speed import Speed
from laconic.shard.policies import Placement, SumsWhere, Where

_WORDS = {
    "none": "free after each use",
    "host": "as node shards in host memory",
    "device": "as node shards on the device",
    "rank": "whole on each rank",
}
JOINING = Speed(bytes_per_s=1e11)
"""The copy of a node shard that rests into the whole weights, in memory: so little that it decides between equals."""
_EQUAL = 1e-9
"""Sums of seconds that differ by less, relative to them, are equal: they were added in another order."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speed of each kind of transfer."""

    node: Speed
    """Across the nodes."""
    local: Speed
    """Inside a node."""
    copy: Speed | None
    """Between host and device; None where the device is the CPU, and nothing is copied."""


@dataclass(frozen=True, kw_only=True)
class BucketUse:
    """One bucket of a unit, in bytes on each rank."""

    whole_bytes: int
    """Of the gathered weights."""
    node_bytes: int
    """Of the node shard."""
    crossing_bytes: int
    """Received from other nodes in a gather."""
    gradient_bytes: int
    """Of whole gradients; 0 if the bucket is frozen."""
    node_gradient_bytes: int
    """Of sums of the node."""
    waiting_bytes: int = 0
    """Of gradients that wait whole, beyond what waiting sums of the node take."""
    dropped_bytes: int = 0
    """Of this rank's shard, if it goes while its copy rests elsewhere, as a frozen one does."""

    @property
    def is_trained(self) -> bool:
        """True if its weights change in a step."""
        return self.gradient_bytes > 0


@dataclass(frozen=True, kw_only=True)
class UnitUse:
    """The use of one unit in an optimizer step."""

    buckets: tuple[BucketUse, ...]
    num_gathers: int
    """The times that its weights are gathered, if they rest nowhere."""
    num_early_sums: int
    """The times that its gradients are summed before the micro-batch that syncs, if they do not wait whole."""
    keeps_copies: bool
    """True if weights cross as differences to a node shard, which must rest somewhere."""
    is_around: bool = False
    """True if other units run in its forward, as in the root's: then it is whole when a step needs most memory."""


@dataclass(frozen=True, kw_only=True)
class Passing:
    """The bytes by which the fullest moment of a step is fuller than it were if gathered weights took no memory."""

    around_bytes: int = 0
    """Those of units that are around others."""
    others_bytes: int = 0
    """Those of the others."""
    all_bytes: int = 0
    """Those of all."""


class Saving(NamedTuple):
    """The seconds that a placement saves and the bytes that it takes, beside a unit that rests nowhere."""

    seconds: float
    device_bytes: int
    host_bytes: int


class Chosen(NamedTuple):
    """The placements of all units, and what they save and take together."""

    placements: list[Placement]
    saving: Saving

    def __str__(self) -> str:
        """The choice in one line."""
        weights = Counter(each.weights for each in self.placements)
        parts = [f"{count} {_WORDS[where]}" for where, count in weights.most_common()]
        whole = sum(each.gradients == "rank" for each in self.placements)
        if whole:
            parts.append(f"gradients of {whole} whole until the last micro-batch")
        return (
            f"cache='auto' places {len(self.placements)} units: {', '.join(parts)}. That takes "
            f"{max(0, self.saving.device_bytes) / 1e9:.2f} GB more of each device and "
            f"{self.saving.host_bytes / 1e9:.2f} GB of host memory, and saves "
            f"{float(f'{self.saving.seconds:.3g}'):,g} s of transfers a step"
        )


def choose_placements(
    units: Sequence[UnitUse], speeds: Speeds, *, device_bytes: int, host_bytes: int, passing: Passing | None = None
) -> Chosen:
    """Choose placements of all units that save many seconds of transfers: [Note: Placement], [Note: A good set].

    Args:
        units: in the order of forward. Of units alike, the last ones get more memory, since backward begins with them.
        speeds: the speed of transfers.
        device_bytes: the most by which the fullest moment may grow on the device: [Note: What a choice takes].
        host_bytes: the most that all may take of the host's memory.
        passing: what whole weights add to the fullest moment of a step in which nothing rests. Default: nothing.

    Raises:
        ValueError: units that keep copies for differences on the wire find no room for them.
    """
    options, passing = [list(_options(unit, speeds)) for unit in units], passing or Passing()
    found = [
        _best(limited, device_bytes + credit_bytes, host_bytes, credit_bytes)
        for are_whole, credit_bytes in (
            ((), 0),
            ((True,), passing.around_bytes),
            ((False,), passing.others_bytes),
            ((True, False), passing.all_bytes),
        )
        if (limited := _limited(units, options, are_whole)) is not None
    ]
    chosen = max((each for each in found if each is not None), key=lambda each: each.saving.seconds, default=None)
    if chosen is None:
        need_bytes = sum(bucket.node_bytes for unit in units if unit.keeps_copies for bucket in unit.buckets)
        raise ValueError(
            f"wire= sends differences to copies of the weights, {need_bytes / 1e9:.2f} GB on each rank, but "
            f"device_bytes={device_bytes} and host_bytes={host_bytes} have no room for them; raise one, or use "
            "wire='exact'"
        )
    return chosen


def _limited(
    units: Sequence[UnitUse], options: Sequence[Sequence[tuple[Placement, Saving]]], are_whole: tuple[bool, ...]
) -> list[list[tuple[Placement, Saving]]] | None:
    """The options with which all units of some kinds, around others or not, rest whole; None if one cannot."""
    limited = [
        [option for option in each if unit.is_around not in are_whole or option[0].weights == "rank"]
        for unit, each in zip(units, options, strict=True)
    ]
    return limited if all(limited) else None


def _best(
    options: Sequence[Sequence[tuple[Placement, Saving]]], device_bytes: int, host_bytes: int, credit_bytes: int
) -> Chosen | None:
    """A good choice of these, which leave `credit_bytes` that a step without them takes; None if none fits."""
    numbers = good_set([[saving for _, saving in each] for each in options], device_bytes, host_bytes)
    if numbers is None:
        return None
    chosen = [each[number] for each, number in zip(options, numbers, strict=True)]
    total = _total(saving for _, saving in chosen)
    return Chosen(
        [placement for placement, _ in chosen], total._replace(device_bytes=total.device_bytes - credit_bytes)
    )


def _total(savings: Iterator[Saving]) -> Saving:
    each = list(savings)
    return Saving(*(sum(values) for values in zip(*each, strict=True))) if each else Saving(0.0, 0, 0)


def _options(unit: UnitUse, speeds: Speeds) -> Iterator[tuple[Placement, Saving]]:
    """The placements of a unit, those that take less first."""
    crosses = any(bucket.crossing_bytes for bucket in unit.buckets)
    moves = crosses or any(bucket.whole_bytes > bucket.node_bytes for bucket in unit.buckets)
    may_rest: dict[Where, bool] = {"none": not unit.keeps_copies, "host": crosses, "device": crosses, "rank": moves}
    weights = [rests for rests, may in may_rest.items() if may]
    may_wait = unit.num_early_sums > 0 and any(bucket.is_trained for bucket in unit.buckets)
    sums: list[SumsWhere] = ["node", "rank"] if may_wait else ["node"]
    nowhere_s = _gather_s(unit, "none", speeds)
    found: dict[Saving, Placement] = {}
    for rests, waits in product(weights, sums):
        gathers, gradients = _resting(unit, rests), _waiting(unit, waits, speeds)
        saved_s = nowhere_s - _gather_s(unit, rests, speeds) + gradients.seconds
        saving = Saving(saved_s, gathers.device_bytes + gradients.device_bytes, gathers.host_bytes)
        found[saving] = Placement(weights=rests, gradients=waits)  # of two that are equal, the one that moves less
    for saving in sorted(found, key=lambda each: (each.device_bytes, each.host_bytes, -each.seconds)):
        yield found[saving], saving


def _gather_s(unit: UnitUse, rests: Where, speeds: Speeds) -> float:
    """The seconds of a step's gathers and copies."""
    total, uses = 0.0, unit.num_gathers
    for bucket in unit.buckets:
        changes = min(uses, 1) if bucket.is_trained else 0
        crossings = uses if rests == "none" else changes
        joins = changes if rests == "rank" else uses
        total += crossings * speeds.node.seconds(bucket.crossing_bytes)
        total += joins * speeds.local.seconds(bucket.whole_bytes - bucket.node_bytes)
        if rests == "host" and speeds.copy is not None:  # out after a crossing, else in
            total += uses * speeds.copy.seconds(bucket.node_bytes)
        if rests in ("host", "device"):
            total += uses * JOINING.seconds(bucket.node_bytes)
    return total


def _resting(unit: UnitUse, rests: Where) -> Saving:
    whole_bytes, node_bytes, dropped_bytes = (
        sum(getattr(bucket, name) for bucket in unit.buckets) for name in ("whole_bytes", "node_bytes", "dropped_bytes")
    )
    on_device = {"none": 0, "host": 0, "device": node_bytes, "rank": whole_bytes}[rests]
    return Saving(0.0, on_device - (dropped_bytes if rests != "none" else 0), node_bytes if rests == "host" else 0)


def _waiting(unit: UnitUse, waits: SumsWhere, speeds: Speeds) -> Saving:
    if waits == "node":
        return Saving(0.0, 0, 0)
    seconds = sum(speeds.local.seconds(bucket.gradient_bytes - bucket.node_gradient_bytes) for bucket in unit.buckets)
    return Saving(unit.num_early_sums * seconds, sum(bucket.waiting_bytes for bucket in unit.buckets), 0)


# -- the knapsack ------------------------------------------------------------------------------------------------------


def good_set(options: Sequence[Sequence[Saving]], device_bytes: int, host_bytes: int) -> list[int] | None:
    """Choose one of each unit's `options`, by index, that save much together within the bytes: [Note: A good set].

    None if even those that take least do not fit. Of units that are alike, the last ones get what takes more.

    Bytes may be negative: what an option frees. Reference: tests/reference/placement.py.
    """
    found = _steepest(options, device_bytes, host_bytes)
    most_s = float("-inf") if found is None else _saved_s(options, found)
    last_alike = {tuple(each): unit for unit, each in enumerate(options)}
    for unit in last_alike.values():
        for number, given in enumerate(options[unit]):
            others: list[Sequence[Saving]] = [*options[:unit], [given], *options[unit + 1 :]]
            numbers = _steepest(others, device_bytes, host_bytes)
            if numbers is not None and (seconds := _saved_s(others, numbers)) > most_s + _EQUAL * abs(most_s):
                numbers[unit] = number
                found, most_s = numbers, seconds
    return found


def _saved_s(options: Sequence[Sequence[Saving]], numbers: Sequence[int]) -> float:
    return sum(each[number].seconds for each, number in zip(options, numbers, strict=True))


def _steepest(options: Sequence[Sequence[Saving]], device_bytes: int, host_bytes: int) -> list[int] | None:
    """A set that fits, made by one steepest step after the other; None if those that take least do not fit."""
    left, first = [device_bytes, host_bytes], dict[int, int]()
    for unit in sorted(range(len(options)), key=lambda unit: -min(sum(each[1:]) for each in options[unit])):
        fitting = [number for number, each in enumerate(options[unit]) if _fits(each[1:], left)]
        if not fitting:
            return None
        first[unit] = min(fitting, key=lambda number: options[unit][number][1:])
        _take(options[unit][first[unit]][1:], left)
    numbers = [first[unit] for unit in range(len(options))]

    def slope(step: tuple[int, int]) -> float:
        before, after = options[step[0]][first[step[0]]], options[step[0]][step[1]]
        return (after.seconds - before.seconds) / max(1, after.device_bytes - before.device_bytes)

    steps = [(unit, number) for unit in reversed(range(len(options))) for number in range(len(options[unit]))]
    for unit, number in sorted(steps, key=slope, reverse=True):
        before, after = options[unit][numbers[unit]], options[unit][number]
        more = after.device_bytes - before.device_bytes, after.host_bytes - before.host_bytes
        if after.seconds > before.seconds and _fits(more, left):
            _take(more, left)
            numbers[unit] = number
    return numbers


def _fits(taken: Sequence[int], left: Sequence[int]) -> bool:
    return taken[0] <= left[0] and taken[1] <= left[1]


def _take(taken: Sequence[int], left: list[int]) -> None:
    left[:] = left[0] - taken[0], left[1] - taken[1]
