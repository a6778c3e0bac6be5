"""A thread that says for which ranks this rank waits in vain, and proves that it does.

[Note: Ranks that do not come]
A collective ends when all its ranks have called it. If one rank evaluates alone, or has fewer batches than the others,
the others wait until the backend's time-out, and its error does not say for whom. So each rank keeps in memory how
often each of its units ran, and the last thing that one of them did. A thread looks at this every few seconds. When
nothing has happened on a rank for a while (`report_waits`), the thread publishes these numbers in the rendezvous store,
and reads those of the other ranks. If some are behind, the thread prints one line that names them, and the error of a
time-out carries the line as a note. A rank that is behind is alive but elsewhere, so its own thread has published its
numbers for the same reason. A rank that goes on takes them back. A rank that ends leaves a last word. While all goes
well nothing is sent.

A rank that has waited three seconds for one transfer looks for a proof that it will never end: [Note: Proof that a
transfer never ends] in journal.py. If there is one, it writes the verdict into the store, and closes the connections
of the group on which it waits, so that the wait ends at once with an error, there and on the group's other ranks. Where
such an error comes out of a transfer, `waiting_for` raises RanksDifferError with the verdict in its place, or
PeerFailedError with the first failure. So the exception itself says which rank is elsewhere, wherever it is shown.
Rank 0 may host the store and may end with its error. So it raises the error only when each rank that the verdict names
has read the verdict, or has ended, or has not answered for five seconds.

With Gloo the host waits for each transfer, so the thread knows for which. With NCCL the device waits, and the host goes
on until it needs a value, perhaps several units later. The thread then sees that nothing happens any more, and prints
the line if another rank is behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from threading import get_ident
from typing import Any, TypeVar

import torch.distributed as dist

from laconic import _compat
from laconic.comm.entries import EntryError, decode, encode
from laconic.comm.failure import PeerFailedError, first_failure_behind
from laconic.comm.groups import has_peers
from laconic.comm.journal import Awaited, RankRecord, Ticket, here, reasons_to_wait
from laconic.comm.ring import address_of
from laconic.errors import RanksDifferError

_T = TypeVar("_T")
REMEDY = (
    "All ranks must run the same program: every rank calls the same units, takes the same steps, and calls what is "
    "collective (full_tensor, state_dict, clip_grad_norm_, a save) too"
)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Ranks whose programs differ, so that they wait for each other for ever."""

    ranks: list[int]
    line: str
    """The reason of each rank, in one line."""


def find_proof(own_rank: int, records: Mapping[int, RankRecord]) -> Proof | None:
    """Find a proof that this rank's wait never ends. `records` has this rank's and those that others have told."""
    return _differing_names(own_rank, records) or _vain_wait(own_rank, records)


def _proof(ranks: list[int], reasons: str) -> Proof:
    *first, last = map(str, sorted({*ranks}))
    return Proof(
        ranks=sorted({*ranks}), line=f"ranks {', '.join(first)} and {last} run different programs: {reasons}. {REMEDY}"
    )


def _differing_names(own_rank: int, records: Mapping[int, RankRecord]) -> Proof | None:
    """Two names under one number of a group."""
    own = records[own_rank]
    for rank, other in records.items():
        for group in own.groups.keys() & other.groups.keys():
            ours, theirs = own.groups[group], other.groups[group]
            for number in range(max(1, ours.issued - len(ours.last) + 1), min(ours.issued, theirs.issued) + 1):
                name, other_name = ours.name_of(number), theirs.name_of(number)
                if other_name not in (None, name):
                    reason = (
                        f"rank {rank} differs from rank {own_rank}: transfer {number} of their group is {other_name} "
                        f"there ({other.step}), and {name} on rank {own_rank} ({own.step})"
                    )
                    return _proof([own_rank, rank], reason)
    return None


def _vain_wait(own_rank: int, records: Mapping[int, RankRecord]) -> Proof | None:
    """Ranks that wait for each other, one for the next, from this rank to itself or to a rank that has ended."""
    paths, reached = [[own_rank]], set[int]()
    for path in paths:
        for awaited in _awaited(path[-1], records):
            if awaited == own_rank or records[awaited].has_ended:
                reasons = "; ".join(_reason(a, b, records) for a, b in pairwise([*path, awaited]))
                never = ": none of them ever goes on" if awaited == own_rank else ""
                return _proof([*path, awaited], f"{reasons}{never}")
            if awaited not in reached:
                reached.add(awaited)
                paths.append([*path, awaited])
    return None


def _awaited(rank: int, records: Mapping[int, RankRecord]) -> list[int]:
    """The ranks that have not issued the transfer for which `rank` waits. Ranks without a record may have."""
    ticket = records[rank].ticket
    if ticket is None:
        return []
    groups = {other: records[other].groups for other in ticket.ranks if other != rank and other in records}
    return [
        other for other, own in groups.items() if ticket.group not in own or own[ticket.group].issued < ticket.number
    ]


def _reason(rank: int, other: int, records: Mapping[int, RankRecord]) -> str:
    """Say that `rank` waits for `other`, and where both are."""
    own = records[rank]
    return f"rank {rank} waits for {own.awaited} {own.step}: {records[other].absence(other, own)}"


_KEY = "laconic/progress"
_AFTER_S = 30.0
_LOOKS = 6  # of the thread, in the time after which it reports
_MOST_INTERVAL_S = 1.0
_PROOF_S = 3.0  # after which a rank that waits looks for a proof
_RARER = 1.25  # the next look for a proof comes after so many times the wait until this one
_ANSWER_S = 5.0  # for an answer of the store, and for ranks to read a verdict
_SETTLE_POLL_S = 0.1  # between two looks whether they have
_MOST_NAMED = 4  # ranks in a line
_LOST = OSError, RuntimeError  # the process that hosts the store has ended; torch's own errors are RuntimeErrors


class waiting_for:
    """A context manager that notes that this rank waits for a transfer, and for how long.

    A RuntimeError of the block, such as a lost connection or a time-out, becomes a PeerFailedError with the first
    failure, if another rank has failed or is gone; else a RanksDifferError with the line of [Note: Ranks that do not
    come], if there is one. It is a class because a generator would cost two microseconds more.
    """

    __slots__ = ("_before", "_begun_s", "key", "seconds", "ticket", "transfer")

    def __init__(
        self,
        transfer: object,
        ticket: Ticket | None = None,
        seconds: MutableMapping[Any, float] | None = None,
        key: Any = None,
    ) -> None:
        """Wait for `transfer`, whose text is a name for messages. The duration is added to `seconds[key]`."""
        self.transfer, self.ticket, self.seconds, self.key = transfer, ticket, seconds, key

    def __enter__(self) -> None:
        thread = get_ident()
        self._before = here.waits.get(thread)
        here.waits[thread] = self
        here.events += 1
        self._begun_s = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.seconds is not None:
            self.seconds[self.key] += time.perf_counter() - self._begun_s
        try:
            if isinstance(error, RuntimeError):
                raise_diagnosis(error)
        finally:
            if self._before is None:
                del here.waits[get_ident()]
            else:
                here.waits[get_ident()] = self._before
            here.events += 1


def raise_diagnosis(error: RuntimeError) -> None:
    """Raise what is behind the error of a transfer, if it is known and `error` does not say it."""
    if isinstance(error, (PeerFailedError, RanksDifferError)):
        return
    line = "" if _watch is None else _watch.told_line()  # at once: who told it may host the store
    first = "" if line else first_failure_behind(error)
    if first:
        raise PeerFailedError(f"{first}\n(here a transfer ended with: {error})") from error
    if _watch is not None and (line := line or _watch.explain()):
        _watch.settle()
        raise RanksDifferError(f"{line} (the transfer ended with: {error})") from error


def report_waits(after_s: float) -> None:
    """Set after how many seconds without progress a rank names the ranks that it waits for; 0 means never.

    Default: 30, or half the time-out of the default process group if that is less. Call it on all ranks, before the
    first call of `fully_shard` or of anything else that makes a `Cluster`.
    """
    global _after_s
    _after_s = after_s


def watch_progress() -> None:
    """Start the thread of [Note: Ranks that do not come] for the default process group, unless it runs already."""
    global _watch
    world = dist.group.WORLD
    if world is None or not has_peers(world):
        return
    if threading.current_thread() is not threading.main_thread():  # threads that play ranks share one memory
        return
    timeout = _compat.timeout_of(world)
    default_s = _AFTER_S if timeout is None else min(_AFTER_S, timeout.total_seconds() / 2)
    after_s = default_s if _after_s is None else _after_s
    if after_s == 0 or (_watch is not None and _watch.world() is world):
        return
    if _watch is None:
        atexit.register(_leave_last_word)
    else:
        _watch.end()
    _watch = _Watch(world, after_s)


_after_s: float | None = None
_watch: _Watch | None = None


def _leave_last_word() -> None:
    assert _watch is not None
    _watch.end(last_word=True)


class _Watch:
    """The thread, and its connection to the store."""

    def __init__(self, world: dist.ProcessGroup, after_s: float) -> None:
        self.world = weakref.ref(world)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._board = _Board()
        self._after_s, self._interval_s = after_s, min(_MOST_INTERVAL_S, after_s / _LOOKS)
        self._host_waits = dist.get_backend(world) == "gloo"
        self._events, self._since = here.events, time.time()
        self._is_published = False
        self._line = ""
        self._verdict: Proof | None = None
        """A proof that this rank waits in vain."""
        self._next_look_s = self._proof_s = min(_PROOF_S, after_s)  # counted from the last event
        self._lock, self._ending, self._pid = threading.Lock(), threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="laconic-watch", daemon=True)
        self._thread.start()

    def explain(self) -> str:
        """Return the line about the ranks that do not come; empty if none is known."""
        with contextlib.suppress(*_LOST), self._lock:
            self._look(is_asked=True)
        return self._line if self._verdict is None else self._verdict.line

    def told_line(self) -> str:
        """Return the proof that this rank waits in vain, if it or another rank has told one; else ""."""
        ticket = here.ticket()
        with contextlib.suppress(*_LOST):
            self._take_verdict(None if ticket is None else ticket.awaited())
        return "" if self._verdict is None else self._verdict.line

    def settle(self) -> None:
        """Say that this rank has read the verdict; rank 0 waits until all that it names have."""
        if self._verdict is None:
            return
        with contextlib.suppress(*_LOST):
            self._board.put(f"read/{self._rank}", True)
            late, deadline = [rank for rank in self._verdict.ranks if rank != self._rank], time.monotonic() + _ANSWER_S
            while self._rank == 0 and late and time.monotonic() < deadline:
                time.sleep(_SETTLE_POLL_S)
                records = {rank: self._board.get(RankRecord, str(rank)) for rank in late}
                ended = {rank for rank, record in records.items() if record is not None and record.has_ended}
                late = [rank for rank in late if rank not in ended and not self._board.get(bool, f"read/{rank}")]

    def end(self, *, last_word: bool = False) -> None:
        """End the thread. With `last_word`, tell the other ranks that this one ends."""
        if self._ending.is_set() or os.getpid() != self._pid:  # a fork has no threads
            return
        self._ending.set()
        self._thread.join(_ANSWER_S)  # a thread that returns from C++ while the interpreter ends aborts the process
        if last_word:
            with contextlib.suppress(*_LOST):
                self._board.put(str(self._rank), here.record(time.time(), has_ended=True))

    def _run(self) -> None:
        with contextlib.suppress(*_LOST):
            while not self._ending.wait(self._interval_s):
                with self._lock:
                    self._look()

    def _look(self, *, is_asked: bool = False) -> None:
        if self._events != here.events:
            self._events, self._since, self._line = here.events, time.time(), ""
            self._next_look_s = self._proof_s
            if self._is_published:
                self._is_published = False
                self._board.put(str(self._rank), None)
        own, idle_s = here.record(self._since), time.time() - self._since
        if not self._is_published and (is_asked or idle_s >= (self._after_s if own.ticket is None else self._proof_s)):
            self._is_published = True
            self._board.put(str(self._rank), own)
        if self._verdict is not None or not (is_asked or idle_s >= self._next_look_s):
            return
        is_late = idle_s >= self._after_s + 2 * self._interval_s  # the other ranks' threads have looked by then
        may_wait = own.awaited is not None or not self._host_waits
        reports = is_asked or (is_late and may_wait and not self._line)
        if own.ticket is None and not reports:
            return
        self._next_look_s = _RARER * idle_s
        records = ((rank, self._board.get(RankRecord, str(rank))) for rank in range(self._num_ranks))
        others = {rank: record for rank, record in records if record is not None and rank != self._rank}
        if own.ticket is not None:
            self._prove(own, others)
        if reports and self._verdict is None:
            self._line = self._compare(own, others)
            if self._line and not is_asked:
                print(f"laconic: {self._line}", file=sys.stderr, flush=True)

    def _prove(self, own: RankRecord, others: Mapping[int, RankRecord]) -> None:
        """Look for a proof that this rank waits in vain. If there is one, tell it, and end the wait."""
        self._take_verdict(own.ticket)
        if self._verdict is None:
            self._verdict = find_proof(self._rank, {self._rank: own, **others})
            if self._verdict is None:
                return
            self._board.put("verdict", self._verdict)
        ticket = here.ticket()
        group = None if ticket is None else ticket.journal.group()
        if group is not None:
            _compat.break_connections(group)

    def _take_verdict(self, ticket: Awaited | None) -> None:
        """Take the proof that another rank has told, if it is about the wait of `ticket`."""
        if self._verdict is None and ticket is not None:
            told = self._board.get(Proof, "verdict")  # a damaged one can be found again
            if told is not None and {*told.ranks} & {self._rank, *ticket.ranks}:
                self._verdict = told

    def _compare(self, own: RankRecord, others: Mapping[int, RankRecord]) -> str:
        """Return the line about the ranks that do not come; empty if none is behind."""
        reasons = reasons_to_wait(own, others)
        if not reasons:
            return ""
        more = f"; and {len(reasons) - _MOST_NAMED} more ranks" if len(reasons) > _MOST_NAMED else ""
        awaited = f" for {own.awaited}" if own.awaited else ""
        named = "; ".join(reasons[:_MOST_NAMED])
        return f"rank {self._rank} has waited {own.idle_s} s{awaited} {own.step}: {named}{more}"


class _Board:
    """The entries by which ranks inform each other in the rendezvous store: a record of each, and the last proof."""

    def __init__(self) -> None:
        # a clone has a connection of its own, so the thread never waits behind a blocking call of the main thread
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))

    def put(self, name: str, value: Any) -> None:
        """Write a value; None takes it back."""
        self._reach()
        self._store.set(f"{_KEY}/{name}", "" if value is None else encode(value))

    def get(self, kind: type[_T], name: str) -> _T | None:
        """Read a value; None if there is none, or a damaged one, which a line names."""
        key = f"{_KEY}/{name}"
        self._reach()
        text = self._store.get(key) if self._store.check([key]) else b""
        try:
            return decode(kind, text) if text else None
        except EntryError as error:
            told = f"laconic: the entry {key} of the store is damaged ({error}), and is not used"
            print(told, file=sys.stderr, flush=True)
            return None

    def _reach(self) -> None:
        """Raise an error of `_LOST` if the store is lost. torch would notice as well, but also log a page of frames."""
        address = address_of(self._store)
        if address is not None:
            socket.create_connection(address, _ANSWER_S).close()
