"""Plain counters of the units that ran on each rank. [Note: Ranks that do not come] in comm/watch.py gives the use."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laconic.comm.entries import decode, encode
from laconic.comm.journal import Awaited, Entries, journals, waits

Action = Literal["in forward", "after forward", "in backward", "after backward"]
"""The last thing that a unit did."""


class UnitProgress:
    """How often one unit has run on this rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.forwards = 0
        self.backwards = 0
        self.number = 0
        """The units that this process had made before."""
        here.add(self)

    def enter_forward(self) -> None:
        """Count a forward that begins."""
        self.forwards += 1
        here.note(self, "in forward")

    def leave_forward(self) -> None:
        """Note that a forward has ended."""
        here.note(self, "after forward")

    def enter_backward(self) -> None:
        """Count a backward that begins."""
        self.backwards += 1
        here.note(self, "in backward")

    def leave_backward(self) -> None:
        """Note that a backward has ended."""
        here.note(self, "after backward")


class Here:
    """The counters of this rank, and the last thing that one of its units did."""

    def __init__(self) -> None:
        self.events = 0
        """The number of things that happened: units that began or ended, and transfers that were awaited or came."""
        self.awaited: str | None = None
        """The transfer for which a thread of this rank waits."""
        self._units = weakref.WeakValueDictionary[int, UnitProgress]()  # by the number of units made before
        self._num_made = 0
        self._last: tuple[UnitProgress, Action] | None = None

    def add(self, unit: UnitProgress) -> None:
        """Number a unit. Ranks make their units in the same order, so these have the same numbers."""
        unit.number = self._num_made
        self._units[unit.number] = unit
        self._num_made += 1

    def note(self, unit: UnitProgress, action: Action) -> None:
        """Note what a unit does."""
        self._last = unit, action
        self.events += 1

    def record(self, since: float, *, has_ended: bool = False) -> RankRecord:
        """Make a record of this rank. `since` is the time of the last event, in seconds since the epoch."""
        last, action = self._last or (None, None)
        units = [unit for reference in self._units.valuerefs() if (unit := reference()) is not None]
        ticket = waits.of_program()  # before the journals, which then have all that it needs
        return RankRecord(
            counts={str(unit.number): (unit.name, unit.forwards, unit.backwards) for unit in units},
            last=None if last is None else last.number,
            action=action,
            awaited=self.awaited,
            since=since,
            has_ended=has_ended,
            ticket=None if ticket is None else ticket.awaited(),
            groups=journals(),
        )


here = Here()
"""This process."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The counters of one rank in the form that the other ranks read."""

    counts: dict[str, tuple[str, int, int]]
    """The name, the forwards and the backwards of each unit that lives, by its number (JSON has no keys but text)."""
    last: int | None
    """The number of the unit that did something last."""
    action: Action | None
    awaited: str | None
    since: float
    has_ended: bool
    ticket: Awaited | None = None
    """The numbered transfer for which the rank waits: [Note: Proof that a transfer never ends] in journal.py."""
    groups: dict[str, Entries] = field(default_factory=dict)
    """What the rank has issued on each process group."""

    def encode(self) -> str:
        """Return the record as an entry of a store."""
        return encode(self)

    @staticmethod
    def decode(text: bytes) -> RankRecord:
        """Return the record of `encode`. Raises: EntryError."""
        return decode(RankRecord, text)

    @property
    def idle_s(self) -> int:
        """The seconds since the last event."""
        return max(0, round(time.time() - self.since))

    @property
    def step(self) -> str:
        """The last thing that a unit did, such as "in forward 26 of blocks.0"."""
        unit = self.counts.get(str(self.last))
        if unit is None or self.action is None:
            return "before the first forward"
        name, forwards, backwards = unit
        return f"{self.action} {forwards if 'forward' in self.action else backwards} of {name}"

    def lacks(self, other: RankRecord) -> str:
        """The pass, such as "forward 26 of blocks.0", that `other` did last and this rank never entered; else ""."""
        unit, own = other.counts.get(str(other.last)), self.counts.get(str(other.last))
        if other.action is None or unit is None or own is None or own[0] != unit[0]:  # they have made different models
            return ""
        name, forwards, backwards = unit
        if "forward" in other.action:
            return f"forward {forwards} of {name}" if own[1] < forwards else ""
        return f"backward {backwards} of {name}" if own[2] < backwards else ""

    @property
    def whereabouts(self) -> str:
        """Where the rank is, for a message."""
        if self.has_ended:
            return f"it ended {self.idle_s} s ago {self.step}"
        awaited = f"waits for {self.awaited}" if self.awaited else "waits for no transfer of laconic"
        return f"it was last seen {self.idle_s} s ago {self.step}, and {awaited}"


def reasons_to_wait(own: RankRecord, others: Mapping[int, RankRecord]) -> list[str]:
    """Say for which ranks the rank of `own` waits, and where they are: the ranks that are behind.

    If none is behind but a transfer does not come, these are the ranks that have ended or wait for no transfer.
    """
    behind = [(rank, other, missed) for rank, other in others.items() if (missed := other.lacks(own))]
    if behind or own.awaited is None:
        return [f"rank {rank} never entered {missed}; {other.whereabouts}" for rank, other, missed in behind]
    elsewhere = [(rank, other) for rank, other in others.items() if other.has_ended or other.awaited is None]
    return [f"rank {rank} does not take part; {other.whereabouts}" for rank, other in elsewhere]
