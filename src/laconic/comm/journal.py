"""What this rank has issued on each process group: numbered transfers, with their names.

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

import _thread
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

_KEPT = 32  # names of the last transfers of a group

Label = tuple[str, str]
"""The kind of a transfer, and the unit that it belongs to, or ""."""


class Journal:
    """The transfers that this rank has issued on one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = group.group_name
        self.ranks = dist.get_process_group_ranks(group)
        self.count = 0
        self.last: deque[Label] = deque(maxlen=_KEPT)

    def entries(self) -> Entries:
        """Return the journal in the form that the other ranks read."""
        return Entries(self.count, [described(*label) for label in list(self.last)])


@dataclass(frozen=True, slots=True)
class Ticket:
    """A transfer that was issued, and may be waited for."""

    group: ref[dist.ProcessGroup]
    journal: Journal
    number: int
    label: Label
    senders: Sequence[int] | None
    """The places, in the group, of the ranks that must issue it; None stands for all."""

    @property
    def tag(self) -> int:
        """A number for messages, by which only transfers of one number and one name meet."""
        return zlib.crc32(f"{self.number} {self.label}".encode()) >> 1

    def awaited(self) -> Awaited:
        """Return the ticket in the form that the other ranks read."""
        ranks = self.journal.ranks
        senders = ranks if self.senders is None else [ranks[place] for place in self.senders]
        return Awaited(self.journal.name, self.number, senders)


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


def described(kind: str, unit: str) -> str:
    """The name of a transfer for a message."""
    return f"{kind} of {unit}" if unit else kind


def issue(group: dist.ProcessGroup, kind: str, unit: str = "", *, senders: Sequence[int] | None = None) -> Ticket:
    """Note that this rank issues a transfer that all ranks of `group` issue. `senders` are places in the group."""
    journal = _journals.get(group)
    if journal is None:
        journal = _journals[group] = Journal(group)
    journal.count += 1
    label = kind, unit
    journal.last.append(label)
    return Ticket(ref(group), journal, journal.count, label, senders)


def last_label(group: dist.ProcessGroup) -> Label | None:
    """The label of the transfer that this rank has issued last on a group; None if it has issued none."""
    journal = _journals.get(group)
    return journal.last[-1] if journal is not None else None


def journals() -> dict[str, Entries]:
    """The journals of all process groups, by their names."""
    return {journal.name: journal.entries() for journal in list(_journals.values())}


class Waits:
    """The tickets for which threads of this rank wait."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}

    def swap(self, ticket: Ticket | None) -> Ticket | None:
        """Set the ticket for which the calling thread waits. Returns the one before."""
        thread = _thread.get_ident()
        before = self._tickets.pop(thread, None)
        if ticket is not None:
            self._tickets[thread] = ticket
        return before

    def of_program(self) -> Ticket | None:
        """The ticket of the main thread, or of one of autograd's.

        While another thread of Python waits, such as a saver's, the program goes on: it proves nothing.
        """
        others = {each.ident for each in threading.enumerate() if not _is_program(each)}
        return next((ticket for thread, ticket in list(self._tickets.items()) if thread not in others), None)


def _is_program(thread: threading.Thread) -> bool:
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


waits = Waits()
"""Those of this process."""
_journals: WeakKeyDictionary[dist.ProcessGroup, Journal] = WeakKeyDictionary()
