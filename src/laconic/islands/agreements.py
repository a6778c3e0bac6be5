"""The agreements of islands that come and go, in a key-value store that none of them hosts.

[Note: One verdict]
The islands of a roster are its members; only they exchange values. A roster never changes: when islands come or go, the
next roster begins. A sync of a fragment is a round. A try of a round in a roster may fail on one rank and succeed on
another, for example when an island dies after it has sent its means to half of the others. So ranks do not use a mean
before the store has a verdict on the try. The last rank of all to complete the try writes "done". A rank whose try
failed writes "lost" or "late", and "late" if it has waited too long for the others. The store takes the first of them
and gives it to all (`compare_set`). So all ranks of all islands use the mean, or none does.

"done" also names the islands that have come meanwhile, and so the members of the next roster. After a try that failed
each island waits for new signs of life of all. One of them writes who has given one, as the next roster, and again the
first writing counts. The islands then repeat the round with the same values, so they lose no step. If all live, the try
has failed because of those that are new, who may be out of reach: the others go on without them.

[Note: Roll call]
An island that waits may die, and to enter a dead one would cost the others a timeout. So after each round that is done
the store has its number as a call, and islands that wait answer it at once. Only those that have answered the last call
enter.

[Note: A run that has ended]
The store may outlive the islands. The last one that goes in order begins the next generation, whose keys have its
number. Each island adds to a counter twice a second. If all counters stand still, all islands of this generation have
died, and those that wait begin the next one.

[Note: A damaged entry]
Everybody who reaches the store may write into it. So all that an island reads there goes through the reader of
[Note: Entries] in comm/entries.py. The island that finds a bad entry writes the reason as the entry "ended", and all
waits look for it, so that all islands end with this reason within seconds. So do those that come, until the rendezvous
is a new one: of this store nothing is sure.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from laconic.comm.entries import EntryError, counter, decode, encode
from laconic.errors import JobError

_T = TypeVar("_T")

_POLL_S = 0.02
_LOOK_S = 0.5  # between two looks at the entry "ended"
_MOST_WAITING = 4096  # islands at once
BEAT_S = 0.5
"""The seconds between two signs of life of an island."""
SILENCE_S = 20.0
"""The seconds without a sign of life after which a generation counts as ended."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The islands that exchange values, until an island comes or goes."""

    number: int
    members: tuple[int, ...]
    """The islands by the numbers that they got when they came, ascending."""
    slots: tuple[int, ...]
    """The slots of the members, which differ. A newcomer gets the lowest that is free. Data are assigned by slots."""
    num_seen: int
    """The islands below this number have been members, or have gone."""
    round: int
    """The first round of the roster. Round 0 founds a run; those in which islands train count from 1."""
    newcomers: tuple[int, ...] = ()
    """The members that hear the state: [Note: Coming] in elastic.py."""
    until: int = 0
    """The round before which the newcomers have heard the whole state."""

    def __post_init__(self) -> None:
        if (
            len(self.members) != len(self.slots)
            or any(len(set(each)) < len(each) for each in (self.members, self.slots, self.newcomers))
            or not {*self.newcomers} <= {*self.members}
            or min((*self.members, *self.slots, self.num_seen, self.round, self.until)) < 0
        ):
            raise ValueError("its members, slots and newcomers contradict each other")

    def new_in(self, round_index: int) -> tuple[int, ...]:
        """The members that hear the state in a round."""
        return self.newcomers if round_index < self.until else ()

    def knowing(self, round_index: int) -> list[int]:
        """The members that have the state before a round. The first of them, the lead, tells it to the others."""
        return [number for number in self.members if number not in self.new_in(round_index)]


NO_ROSTER = Roster(number=-1, members=(), slots=(), num_seen=0, round=0)
"""Before an island has entered."""


class Outcome(Enum):
    """How a try of a round ended."""

    DONE = "done"
    LOST = "lost"
    """A connection was lost."""
    LATE = "late"
    """An island did not come in time, or did not go on."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a try that counts for all ranks: [Note: One verdict]."""

    outcome: Outcome
    newcomers: tuple[int, ...] = ()
    """The islands that enter after a try that is done."""


class RunEndedError(JobError):
    """An island has ended the run for all: [Note: A damaged entry]."""


class TypedStore:
    """The entries that islands share, each read by its type: [Note: A damaged entry].

    All methods raise JobError if the store does not answer, and RunEndedError if the entry is damaged.
    """

    def __init__(self, store: dist.Store, run_store: dist.Store, where: str) -> None:
        """Take the store, that of the whole run, and their address."""
        self.store, self._run_store, self._where = store, run_store, where

    def get(self, kind: type[_T], key: str) -> _T | None:
        """The value of an entry; None if there is none."""
        with self.reaching(key):
            return decode(kind, self.store.get(key)) if self.store.check([key]) else None

    def set(self, key: str, value: Any) -> None:
        """Write an entry."""
        with self.reaching(key):
            self.store.set(key, encode(value))

    def agree(self, kind: type[_T], key: str, proposed: _T) -> _T:
        """Write an entry unless there is one, and return the value of the one that is there."""
        with self.reaching(key):
            return decode(kind, self.store.compare_set(key, "", encode(proposed)))

    def has(self, key: str) -> bool:
        """True if there is an entry."""
        with self.reaching(key):
            return bool(self.store.check([key]))

    def count(self, key: str) -> int:
        """The value of a counter; 0 if there is none."""
        with self.reaching(key):
            return counter(self.store.get(key)) if self.store.check([key]) else 0

    def add(self, key: str) -> int:
        """Add one to a counter, and return it."""
        self.count(key)  # the store closes the connection of an island that adds to what is no number
        with self.reaching(key):
            try:
                return self.store.add(key, 1)
            except ValueError as error:  # of a store in memory, if the entry has changed since
                raise EntryError(str(error)) from error

    def damaged(self, key: str, problem: object) -> NoReturn:
        """End the run for all islands, because of a damaged entry."""
        reason = (
            f"the rendezvous at {self._where} has a damaged entry, {key}: {problem}; somebody else writes there, or "
            "its memory is bad: all islands of this run end here. Start the rendezvous again, and then the islands"
        )
        with contextlib.suppress(dist.DistError):
            self._run_store.compare_set("ended", "", encode(reason))
        raise RunEndedError(reason)

    @contextlib.contextmanager
    def reaching(self, key: str) -> Iterator[None]:
        """Turn errors of the store, and of the entry, into those of the class."""
        try:
            yield
        except EntryError as error:
            self.damaged(key, error)
        except dist.DistError as error:
            raise JobError(
                f"the rendezvous at {self._where} does not answer any more ({str(error)[:200]}), so islands cannot "
                "agree on anything; see whether `laconic rendezvous` still runs there, and start the islands again"
            ) from error


class Agreements(TypedStore):
    """The agreements of one run. Each thread needs agreements of its own, on a connection of its own.

    All methods raise JobError if the store does not answer, and RunEndedError if they find a damaged entry. Those that
    wait raise RunEndedError also if another island has found one.
    """

    def __init__(self, store: dist.Store, run: str, where: str, generation: int | None = None) -> None:
        """Open a generation (default: the newest) of the run `run` in the store at the address `where`."""
        run_store = dist.PrefixStore(f"laconic/{run}", store)
        super().__init__(run_store, run_store, where)
        self._run = TypedStore(run_store, run_store, where)
        self._looked_at = -math.inf
        self._open(generation)

    def _open(self, generation: int | None = None) -> None:
        self.look_for_end()
        newest = self._run.get(int, "generation") or 0
        if newest < 0:
            self._run.damaged("generation", f"{newest} is negative")
        self.generation = newest if generation is None else generation
        self.store = dist.PrefixStore(str(self.generation), self._run_store)  # the keys of this generation
        self._heard: tuple[list[int], float] = [], time.monotonic()
        """The signs of life that `silent_s` has seen last, and when they were new."""

    # -- coming --------------------------------------------------------------------------------------------------------

    def agree_on(self, terms: dict[str, Any]) -> None:
        """Compare what must be equal on all islands with what the first of them has told.

        Raises: JobError that names the first difference.
        """
        first = self.agree(dict[str, Any], "terms", terms)
        for key, value in terms.items():
            if first.get(key) != value:
                raise JobError(
                    f"{key} is {value!r} on this island and {first.get(key)!r} on the islands at {self._where}; all "
                    "islands of a run have the same model and settings, so start this one with those, or give it "
                    "another run_id"
                )

    def come(self) -> int:
        """Queue up. Returns this island's number, which is new."""
        number = self.add("come") - 1
        self.answer(number)
        return number

    def answer(self, number: int) -> None:
        """Answer the last call for an island that waits: [Note: Roll call]."""
        self.set(f"answer/{number}", self.get(str, "call") or "")

    def found(self, islands: int) -> None:
        """Write the first roster, of the first `islands` islands."""
        first = tuple(range(islands))
        self.write(Roster(number=0, members=first, slots=first, num_seen=islands, round=0))

    def num_come(self) -> int:
        """The number of islands that have come so far."""
        return self.count("come")

    def welcome(self, number: int) -> Roster | None:
        """The roster that an island has entered; None if it has to wait."""
        key = f"welcome/{number}"
        entered = self.get(int, key)
        if entered is None:
            return None
        roster = self.roster(entered)
        if number not in roster.members:
            self.damaged(key, f"roster {entered} does not have island {number}")
        return roster

    def beat(self, number: int) -> None:
        """Give a sign of life of an island: [Note: A run that has ended]."""
        self.add("beat")
        self.add(f"beat/{number}")

    def beats(self, numbers: Sequence[int]) -> dict[int, int]:
        """The signs of life that islands have given so far, by their numbers."""
        return {number: self.count(f"beat/{number}") for number in numbers}

    def silent_s(self, *numbers: int) -> float:
        """The seconds for which none of some islands has given a sign of life, or of all, while this one has asked."""
        beats = [*self.beats(numbers).values()] or [self.count("beat")]
        if beats != self._heard[0]:
            self._heard = beats, time.monotonic()
        return time.monotonic() - self._heard[1]

    def begin_generation(self) -> None:
        """Leave a generation that has ended. All islands that do so at once begin the same one."""
        with self._run.reaching("generation"):
            old = encode(self.generation) if self._run.has("generation") else ""
            self._run_store.compare_set("generation", old, encode(self.generation + 1))
        self._open()

    # -- rounds: [Note: One verdict] -----------------------------------------------------------------------------------

    def vote(self, roster: Roster, round_index: int, outcome: Outcome, *, num_ranks: int, patience_s: float) -> Verdict:
        """Tell how a try ended on this rank, and return the verdict on the try.

        `num_ranks` is the number of ranks of all members. Waits `patience_s` seconds for the others.
        """
        of, proposed = f"{roster.number}-{round_index}", Verdict(outcome=outcome)
        if outcome is Outcome.DONE:
            num_done = self.add(f"done/{of}")
            if num_done > num_ranks:
                self.damaged(f"done/{of}", f"{num_done} votes of {num_ranks} ranks")
            if num_done == num_ranks:
                newcomers = self._queued(roster) if round_index else ()  # founders do not know the next round
                proposed = Verdict(outcome=outcome, newcomers=newcomers)
                verdict = self.agree(Verdict, f"verdict/{of}", proposed)
                self.set("call", of)
                return verdict
            self._until(lambda: self.has(f"verdict/{of}"), patience_s)
            proposed = Verdict(outcome=Outcome.LATE)
        return self.agree(Verdict, f"verdict/{of}", proposed)

    def _queued(self, roster: Roster) -> tuple[int, ...]:
        """The islands that wait, and have answered the last call."""
        call = self.get(str, "call") or ""
        come = range(roster.num_seen, self.count("come"))
        if len(come) > _MOST_WAITING:
            self.damaged("come", f"{len(come)} islands wait at once")
        answers = {number: self.get(str, f"answer/{number}") for number in come}
        return tuple(number for number in come if answers[number] == call and not self._is_seen(number))

    def _is_seen(self, number: int) -> bool:
        return self.has(f"welcome/{number}") or self.has_left(number)

    def enlarge(self, roster: Roster, newcomers: tuple[int, ...], round_index: int, until: int) -> Roster:
        """Write the roster that begins as newcomers enter, unless another rank has, and return it.

        Those that are new still hear the state with them, before round `until`.
        """
        slots = list(roster.slots)
        for _ in newcomers:
            slots.append(next(slot for slot in count() if slot not in slots))
        seen = (number for number in count(roster.num_seen) if number not in newcomers and not self._is_seen(number))
        return self.write(
            Roster(
                number=roster.number + 1,
                members=(*roster.members, *newcomers),
                slots=tuple(slots),
                num_seen=next(seen),
                round=round_index,
                newcomers=(*roster.new_in(round_index), *newcomers),
                until=until,
            )
        )

    # -- going ---------------------------------------------------------------------------------------------------------

    def leave(self, roster: Roster, number: int) -> None:
        """Note that an island goes in order. The others do not wait for it."""
        self.set(f"left/{number}", True)
        if all(map(self.has_left, roster.members)):
            self.begin_generation()

    def has_left(self, number: int) -> bool:
        """True if an island has gone in order."""
        return self.has(f"left/{number}")

    def arrive(self, roster: Roster, round_index: int, number: int) -> None:
        """Note that an island begins a try."""
        self.set(f"arrived/{roster.number}-{round_index}/{number}", True)

    def has_begun(self, roster: Roster, round_index: int, number: int) -> bool:
        """True if an island has begun a try."""
        return self.has(f"arrived/{roster.number}-{round_index}/{number}")

    def is_over(self, roster: Roster, round_index: int) -> bool:
        """True if there is a verdict on a try; before this rank has voted it can only have failed."""
        return self.has(f"verdict/{roster.number}-{round_index}")

    def propose(
        self, roster: Roster, round_index: int, before: Mapping[int, int], *, is_late: bool, patience_s: float
    ) -> None:
        """Wait until the living members have given a sign of life, and write them as the next roster.

        Another's writing may count. `before` has the signs of life of the members when the try had failed. After a try
        for which an island did not come in time (`is_late`) only those that came are members. If all are there, only
        those that are not new.
        """

        def silent() -> list[int]:
            beats = self.beats(roster.members)
            return [n for n in roster.members if beats[n] == before[n] and not self.has_left(n)]

        self._until(lambda: self._has_next(roster) or not silent(), patience_s)
        gone = {*silent(), *filter(self.has_left, roster.members)}
        members = [
            n for n in roster.members if n not in gone and (not is_late or self.has_begun(roster, round_index, n))
        ]
        new = roster.new_in(round_index)
        if len(members) == len(roster.members):
            members, new = roster.knowing(round_index), ()
        slots = {number: slot for number, slot in zip(roster.members, roster.slots, strict=True) if number in members}
        self.write(
            replace(
                roster,
                number=roster.number + 1,
                members=tuple(slots),
                slots=tuple(slots.values()),
                round=round_index,
                newcomers=tuple(number for number in new if number in members),
            )
        )

    def _has_next(self, roster: Roster) -> bool:
        return self.has(f"roster/{roster.number + 1}")

    def next_roster(self, roster: Roster, patience_s: float) -> Roster | None:
        """Wait for the roster after `roster`; None if there is none in time."""
        return self.roster(roster.number + 1) if self._until(lambda: self._has_next(roster), patience_s) else None

    # -- rosters -------------------------------------------------------------------------------------------------------

    def write(self, roster: Roster) -> Roster:
        """Write a roster, unless one of its number is there, and tell newcomers. Returns the one that is there."""
        self.agree(Roster, f"roster/{roster.number}", roster)
        agreed = self.roster(roster.number)
        told = agreed.members if agreed.number == 0 else agreed.newcomers
        for number in told:
            if not self.has(f"welcome/{number}"):  # it may be new for several rosters
                self.set(f"welcome/{number}", agreed.number)
        return agreed

    def roster(self, number: int) -> Roster:
        """Read a roster that has been written."""
        key = f"roster/{number}"
        found = self.get(Roster, key)
        if found is None or found.number != number:
            self.damaged(key, f"it is {'missing' if found is None else f'that of number {found.number}'}")
        come = self.count("come")
        if found.num_seen > come or any(member >= come for member in found.members):
            self.damaged(key, "it has islands that have not come")
        return found

    # -- waiting -------------------------------------------------------------------------------------------------------

    def look_for_end(self) -> None:
        """Raise RunEndedError if an island has ended the run. Looks at the store twice a second at most."""
        if time.monotonic() - self._looked_at >= _LOOK_S:
            self._looked_at = time.monotonic()
            reason = self._run.get(str, "ended")
            if reason is not None:
                raise RunEndedError(reason)

    def _until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Wait until the condition holds. Returns whether it does."""
        deadline = time.monotonic() + patience_s
        while not condition():
            self.look_for_end()
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True
