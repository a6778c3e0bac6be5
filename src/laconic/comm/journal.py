"""The record of this rank's work: the numbered transfers of each process group, by name, and the units that ran.

[Note: Proof that a transfer never ends]
A process group matches transfers by their order, so rank A's transfer 57 of a group ends once every other rank of the
group has issued its own 57th. A rank that computes may still come. But if rank B has issued 56 only, and waits itself
for a transfer that A has not issued, then neither goes on, ever. This is a circle in the graph "A waits for B". A rank
that finds itself in one needs no time limit to be sure: it knows its own numbers, so nobody in the circle can have gone
on since it told its numbers. A rank that has ended issues nothing more: that is a proof, too. The third is two names
under one number: rank A's transfer 57 gathers one unit, and rank B's another.

A rank that is slow, or sleeps, proves nothing, however long it takes: it is in no circle. Transfers that not all ranks
of a group issue, such as those of two ranks, have no number and prove nothing either.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

_KEPT = 32  # names of the last transfers of a group

Label = tuple[str, str, int | None]
"""The kind of a transfer, the unit that it belongs to, or "", and its bytes, if they are alike on all ranks."""


class Journal:
    """The transfers that this rank has issued on one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = ref(group), group.group_name
        self.ranks, self.own_rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.count = 0
        self.last: deque[Label] = deque(maxlen=_KEPT)
        self.under_way: deque[tuple[int, Sequence[dist.Work]]] = deque()
        """The works of transfers that have not ended, by number: [Note: Messages that nobody awaits]."""


class Ticket:
    """A transfer that was issued, and may be waited for."""

    __slots__ = ("journal", "label", "number", "senders")

    def __init__(self, journal: Journal, label: Label, senders: Sequence[int] | None = None) -> None:
        """Note in `journal` that this rank issues a transfer. `senders` are places in its group; None means all."""
        journal.count += 1
        journal.last.append(label)
        self.journal, self.number, self.label, self.senders = journal, journal.count, label, senders

    def __str__(self) -> str:
        return described(*self.label[:2])

    def tag(self, nbytes: int | None = None) -> int:
        """A number for messages of `nbytes`, by which only those of one number, one name and one length meet."""
        return zlib.crc32(f"{self.number} {self.label} {nbytes}".encode()) >> 1

    def awaited(self) -> Awaited:
        """Return the ticket in the form that the other ranks read.

        A rank that receives waits for the senders. A rank that sends waits for all, since Gloo sends no byte before the
        receiver is there.
        """
        ranks = self.journal.ranks
        senders = ranks if self.senders is None else [ranks[place] for place in self.senders]
        return Awaited(self.journal.name, self.number, ranks if self.journal.own_rank in senders else senders)


@dataclass(frozen=True)
class Awaited:
    """A transfer for which a rank waits: its group, its number, and the ranks that must issue it."""

    group: str
    number: int
    ranks: list[int]


@dataclass(frozen=True)
class Entries:
    """The number of transfers that a rank has issued on a group, and the names of the last ones."""

    issued: int
    last: list[str]

    def name_of(self, number: int) -> str | None:
        """The name of a transfer, counted from 1; None if it was not issued yet, or is forgotten."""
        place = number - 1 - self.issued + len(self.last)
        return self.last[place] if 0 <= place < len(self.last) else None


def described(kind: str, unit: str, nbytes: int | None = None) -> str:
    """The name of a transfer for a message."""
    name = f"{kind} of {unit}" if unit else kind
    return name if nbytes is None else f"{name} ({nbytes} bytes)"


def issue(
    group: dist.ProcessGroup,
    kind: str,
    unit: str = "",
    *,
    senders: Sequence[int] | None = None,
    nbytes: int | None = None,
) -> Ticket:
    """Note that this rank issues a transfer that all ranks of `group` issue. `senders` are places in it.

    With `nbytes`, transfers of other bytes are others.
    """
    return Ticket(journal_of(group), (kind, unit, nbytes), senders)


def journal_of(group: dist.ProcessGroup) -> Journal:
    """The journal of this rank and a process group."""
    journal = _journals.get(group)
    if journal is None:
        journal = _journals[group] = Journal(group)
    return journal


def last_label(group: dist.ProcessGroup) -> Label | None:
    """The label of the transfer that this rank has issued last on a group; None if it has issued none."""
    journal = _journals.get(group)
    return journal.last[-1] if journal is not None and journal.last else None


_journals: WeakKeyDictionary[dist.ProcessGroup, Journal] = WeakKeyDictionary()


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

    def note(self, action: Action) -> None:
        """Note what the unit does, and count a pass that begins."""
        self.forwards += action == "in forward"
        self.backwards += action == "in backward"
        here.last = self, action
        here.events += 1


class Here:
    """The counters of this rank, and the last thing that one of its units did."""

    def __init__(self) -> None:
        self.events = 0
        """The number of things that happened: units that began or ended, and transfers that were awaited or came."""
        self.waits: dict[int, Any] = {}
        """The `waiting_for` of each thread of this rank that waits for a transfer, by the thread's identity."""
        self._units = weakref.WeakValueDictionary[int, UnitProgress]()  # by the number of units made before
        self._num_made = 0
        self.last: tuple[UnitProgress, Action] | None = None
        """The unit that did something last, and what."""

    def add(self, unit: UnitProgress) -> None:
        """Number a unit. Ranks make their units in the same order, so these have the same numbers."""
        unit.number = self._num_made
        self._units[unit.number] = unit
        self._num_made += 1

    def ticket(self) -> Ticket | None:
        """The ticket for which the main thread waits, or one of autograd's.

        While another thread of Python waits, such as a saver's, the program goes on: it proves nothing.
        """
        main = threading.main_thread()
        others = {
            each.ident
            for each in threading.enumerate()
            if each is not main and not isinstance(each, threading._DummyThread)
        }
        waits = (wait.ticket for thread, wait in list(self.waits.items()) if thread not in others)
        return next((ticket for ticket in waits if ticket is not None), None)

    def record(self, since: float, *, has_ended: bool = False) -> RankRecord:
        """Make a record of this rank. `since` is the time of the last event, in seconds since the epoch."""
        last, action = self.last or (None, None)
        units = [unit for reference in self._units.valuerefs() if (unit := reference()) is not None]
        ticket, waits = self.ticket(), list(self.waits.values())  # before the journals, which then have all for them
        return RankRecord(
            counts={str(unit.number): (unit.name, unit.forwards, unit.backwards) for unit in units},
            last=None if last is None else last.number,
            action=action,
            awaited=str(waits[-1].transfer) if waits else None,
            since=since,
            has_ended=has_ended,
            ticket=None if ticket is None else ticket.awaited(),
            groups={
                each.name: Entries(each.count, [described(*label) for label in list(each.last)])
                for each in list(_journals.values())
            },
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
    """The transfers that the rank has issued on each process group."""

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

    def absence(self, rank: int, other: RankRecord) -> str:
        """Say that this rank, number `rank`, does not come where `other` waits, and where it is."""
        missed = self.lacks(other)
        never = f"rank {rank} never entered {missed}" if missed else f"rank {rank} does not take part"
        if self.has_ended:
            return f"{never}; it ended {self.idle_s} s ago {self.step}"
        awaited = f"waits for {self.awaited}" if self.awaited else "waits for no transfer of laconic"
        return f"{never}; it was last seen {self.idle_s} s ago {self.step}, and {awaited}"


def reasons_to_wait(own: RankRecord, others: Mapping[int, RankRecord]) -> list[str]:
    """Say for which ranks the rank of `own` waits, and where they are: the ranks that are behind.

    If none is behind but a transfer does not come, these are the ranks that have ended or wait for no transfer.
    """
    late = [rank for rank, other in others.items() if other.lacks(own)]
    if not late and own.awaited is not None:
        late = [rank for rank, other in others.items() if other.has_ended or other.awaited is None]
    return [others[rank].absence(rank, own) for rank in late]
