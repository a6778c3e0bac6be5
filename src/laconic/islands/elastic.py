"""The syncs of islands that come and go while the others train on.

[Note: Islands that come and go]
Each island is a job of its own: its ranks have a process group of their own, so the end of an island ends no rank of
another. Islands meet in a store that none of them hosts, where they agree on their members and on every sync:
[Note: One verdict] in agreements.py. Values go straight from island to island, over a Gloo group for each roster and
each place in an island, as in torchft (github.com/meta-pytorch/torchft). torch's groups cannot lose a member, so a new
roster makes a new group.

An island that dies closes its connections, and the others' try of the round fails at once; one that is stuck or cut
off lets it time out. The others wait some seconds for signs of life, go on as the next roster, and repeat the round.
Each rank still has its pseudo-gradient, so no island loses a step. The exchange runs in the background thread, so
training stands still only when the round's mean is due.

[Note: Coming]
An island that comes enters at the end of a round. From the next round on it is a member that weighs nothing. At the
beginning of each round the lead tells those that are new the outer state of the fragment that syncs, and with the mean
of the round they take the same outer step as the others. So after a round of each fragment they have the whole state,
to the bit, and begin to train in step with the others, with fresh inner optimizers. If the lead dies, the round is
repeated with another lead. Islands found a run in round 0, which has no mean: one that is furthest tells all fragments.

[Note: Waits that end]
Gloo waits in C++, while it connects five times as long as it is told, and hears neither of a verdict nor of the end of
the run. So it waits in a thread of its own, and the caller waits for this thread, for the end of the roster, or for the
end of the run, whichever comes first. A thread that is left behind ends when Gloo gives up.
"""

import atexit
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.codec import Codec
from laconic.comm.agreement import ranks_or_self
from laconic.comm.cluster import Cluster
from laconic.errors import JobError
from laconic.islands.agreements import BEAT_S, NO_ROSTER, SILENCE_S, Agreements, Outcome, Roster, RunEndedError
from laconic.islands.all_reduce import IslandGroup, Mean, crc_of
from laconic.islands.exchange import Contribution, Exchange, diverged
from laconic.islands.fragments import SyncSchedule
from laconic.islands.outer_optimizer import OuterFragment, layout_digest
from laconic.islands.policies import Membership

_T = TypeVar("_T")

_HEAR_S = 15.0  # at most, for a sign of life of each island: its thread may have to wait for the interpreter
_WATCH_S = 0.2
_CONNECT_S = 30.0
_MOST_TRIES = 8  # of a round, whose members are the same
_TALK_S = 5.0  # between two messages of an island's ranks, while they wait to enter
_NOTICE_S = 15.0  # until a line says that this island waits for others


class ElasticExchange(Exchange):
    """Means over islands that come and go: [Note: Islands that come and go]. Collective over the ranks of an island.

    Args:
        policy: where islands meet.
        run: the name of the run. Only islands of the same run meet.
        cluster: this island.
        codec: the format of values on the wire.
        fragments: the outer state.
        schedule: when fragments sync.

    Raises:
        JobError: the rendezvous does not answer.
    """

    comes_and_goes = True

    def __init__(
        self,
        policy: Membership,
        run: str,
        cluster: Cluster,
        codec: Codec,
        fragments: Sequence[OuterFragment],
        schedule: SyncSchedule,
    ) -> None:
        super().__init__(cluster, codec, fragments)
        self._policy, self._run, self._schedule = policy, run, schedule
        self._terms = {
            **asdict(schedule),
            "outer optimizer": type(fragments[0].optimizer).__qualname__,
            "parameters (digest)": layout_digest(fragments)[:16],
            "codec": codec.name,
            "ranks of an island": cluster.size,
            "what islands tell": "fragments",  # earlier releases tell the whole state, beside the rounds
            "bytes of 4,096 values": codec.payload_bytes(4096),  # islands of two releases may code otherwise
        }
        self._ranks = ranks_or_self(cluster.flag_group)
        self._shard = self._ranks.rank
        self._agreements = self._open()
        self._roster = NO_ROSTER
        self._group: tuple[int, IslandGroup] | None = None
        self._gloo: dist.ProcessGroup | None = None
        self._round = 0  # of the background thread
        self.number = self.slot = -1
        self._watcher: _Watcher | None = None
        self._hear_s = max(2 * BEAT_S, min(_HEAR_S, policy.timeout_s / 4))
        """The time for signs of life, after a try has failed."""
        self._patience_s = max(0.6 * policy.timeout_s, 0.95 * policy.timeout_s - self._hear_s)
        """The time for a try. Both together are the timeout, less what the agreement itself may take."""

    # -- coming and going: [Note: Coming] ------------------------------------------------------------------------------

    def enter(self, steps: int) -> tuple[int, bool]:
        """See `Exchange.enter`. Waits for the founding islands, or for the end of a round, and for the state.

        Each wait ends after `start_timeout_s` at most, or with the islands.

        Raises:
            JobError: too few islands have come, the others have other settings, all islands that have the state have
                died, or the store has a damaged entry.
        """
        self._create_state()
        entrance, found = Entrance(self._agreements, self._policy, self._terms), None
        while found is None:  # the ranks hear from each other now and then, as their groups have timeouts
            found = self._ranks.on_rank_0(lambda: entrance.wait(_TALK_S), "this island cannot enter")
        generation, number = found
        self._agreements = self._open(generation)
        roster = self._agreements.welcome(number)
        assert roster is not None
        self._roster, self._round, self.is_inside = roster, roster.round, True
        self.number, self.slot = number, roster.slots[roster.members.index(number)]
        if self._ranks.rank == 0:
            self._watcher = _Watcher(self._open(generation), number)
            weakref.finalize(self, self._watcher.over.set).atexit = False
        _entered.add(self)
        _leave_at_exit()
        if roster.number == 0:
            steps, heard = self._take_round(partial(self._found, steps))
            _fill(self._vectors(), heard)
            self._round = self._schedule.rounds(steps) + 1
            return steps, any(self._ranks.gather(bool(heard)))
        while number in self._roster.new_in(self._round):
            self._wait_for_round()
            index = self._round % len(self._fragments)
            fragment = self._fragments[index]
            mean = self.mean(Contribution(fragment=index, step=0, values=torch.zeros_like(fragment.flat)))
            with torch.enable_grad():
                fragment.step(mean.value)
        return (self._round - 1) * self._schedule.interval + self._schedule.overlap, True

    def _found(self, steps: int, islands: IslandGroup) -> tuple[int, list[Tensor]]:
        """Tell all founders the state of the one that is furthest, and the steps after which it is the state.

        Those that have it already, such as from a checkpoint, hear nothing.
        """
        vectors = self._vectors()
        states = islands.gather(steps, *map(crc_of, vectors))
        lead = max(range(len(states)), key=lambda island: states[island][0])
        others = [island for island, state in enumerate(states) if state != states[lead]]
        return states[lead][0], islands.tell(vectors, lead, others)

    def _knowing(self) -> list[int]:
        """The members that have the state before the next round. Raises: JobError if there are none."""
        knowing = self._roster.knowing(self._round)
        if not knowing:
            raise JobError("the islands that had the state died before they told it to this one; start this one again")
        return knowing

    def _wait_for_round(self) -> None:
        """Wait until an island that trains begins the next round: it may be far away, and a try has a timeout.

        Raises: JobError if none of them gives a sign of life.
        """
        roster, agreements, others = self._roster, self._agreements, self._knowing()
        while not any(agreements.has_begun(roster, self._round, number) for number in others):
            agreements.look_for_end()
            if agreements.is_over(roster, self._round):
                return
            if agreements.silent_s(*others) > SILENCE_S:
                names = ", ".join(map(str, others))
                raise JobError(f"islands {names} have given no sign of life for {SILENCE_S:g} s; start this one again")
            time.sleep(_WATCH_S)

    def leave(self) -> None:
        """See `Exchange.leave`."""
        if not self.is_inside:
            return
        number, self.number, self.slot, self.is_inside = self.number, -1, -1, False
        if self._watcher is not None:
            self._watcher.over.set()
            self._watcher.thread.join()
            self._agreements.leave(self._roster, number)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See `Exchange.look`. Raises: RunEndedError if an island has ended the run."""
        if self._watcher is not None and self._watcher.end is not None:
            raise self._watcher.end

    def mean(self, own: Contribution) -> Mean:
        """Return the mean of all islands' contributions. Collective over the members, in the background thread.

        An island whose values are not finite takes part with zeros that weigh nothing, and fails then. The others go
        on without it.

        Raises:
            JobError: the values of this island are not finite; the others have gone on without it; the rendezvous does
                not answer, or has a damaged entry; or every try has failed.
        """
        given = own
        if not own.is_sound:
            given = replace(own, values=torch.zeros_like(own.values), tokens=0, is_sound=True)
        mean, heard = self._take_round(partial(self._tell_and_reduce, given))
        _fill(self._fragments[own.fragment].vectors(), heard)
        if not own.is_sound:
            raise diverged(own, "this island; the others go on without it")
        return mean

    def _tell_and_reduce(self, own: Contribution, islands: IslandGroup) -> tuple[Mean, list[Tensor]]:
        """The mean of a round, and what this island hears of the fragment's state before it."""
        place = self._roster.members.index
        lead, new = place(self._knowing()[0]), [place(number) for number in self._roster.new_in(self._round)]
        heard = islands.tell(self._fragments[own.fragment].vectors(), lead, new)
        return self._reduce(own, islands), heard

    def _take_round(self, action: Callable[[IslandGroup], _T]) -> _T:
        """Try a round until there is the verdict that it is done: [Note: One verdict]. Returns the action's result."""
        tries = 0
        while True:
            roster = self._roster
            result, outcome, error = self._try(roster, action)
            verdict = self._agreements.vote(
                roster,
                self._round,
                outcome,
                num_ranks=len(roster.members) * self._ranks.size,
                patience_s=self._patience_s,
            )
            if verdict.outcome is Outcome.DONE:
                break
            self._reform(roster, is_late=verdict.outcome is Outcome.LATE)
            tries = tries + 1 if set(self._roster.members) == set(roster.members) else 0
            if tries == _MOST_TRIES or (tries and verdict.outcome is Outcome.LATE):
                living = len(self._roster.members)
                raise JobError(
                    f"round {self._round} of the islands has failed again and again, although all {living} live "
                    f"({error}); raise timeout_s={self._policy.timeout_s:g} above the seconds that a message takes, "
                    "and see whether each island can reach all others (GLOO_SOCKET_IFNAME names the network to use)"
                )
        assert result is not None
        self._round += 1
        if verdict.newcomers:
            until = self._round + len(self._fragments)
            self._roster = self._agreements.enlarge(roster, verdict.newcomers, self._round, until)
        return result

    def _try(
        self, roster: Roster, action: Callable[[IslandGroup], _T]
    ) -> tuple[_T | None, Outcome, RuntimeError | None]:
        """Try the round once, among the members of a roster."""
        if self._watcher is not None:
            self._agreements.arrive(roster, self._round, self.number)
        if self._agreements.is_over(roster, self._round):
            return None, Outcome.LOST, None
        try:
            islands = self._connect(roster)
            return self._waiting(roster, lambda: action(islands)), Outcome.DONE, None
        except RuntimeError as error:  # torch has no class for a lost connection that all its backends raise
            is_late = any(word in str(error).lower() for word in ("timed out", "timeout"))
            return None, Outcome.LATE if is_late else Outcome.LOST, error

    def _waiting(self, roster: Roster, action: Callable[[], _T]) -> _T:
        """Run what may wait for the other members: [Note: Waits that end].

        Raises:
            RuntimeError: the roster has failed, so the others do not come; or `action` raised it.
            RunEndedError: an island has ended the run.
        """
        result: Future[_T] = Future()

        def run() -> None:
            try:
                result.set_result(action())
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=run, name="laconic-try", daemon=True).start()
        while not wait([result], _WATCH_S).done:
            self._agreements.look_for_end()
            if self._agreements.is_over(roster, self._round):
                raise RuntimeError(f"the islands have given roster {roster.number} up")
        return result.result()

    def _connect(self, roster: Roster) -> IslandGroup:
        """The members' ranks at this place, connected."""
        if self._group is None or self._group[0] != roster.number:
            self._disconnect()
            rank, size = roster.members.index(self.number), len(roster.members)
            if size > 1:
                connection = self._open(self._agreements.generation).store  # its own: Gloo's waits would block others
                store = dist.PrefixStore(f"group/{roster.number}/{self._shard}", connection)
                self._gloo = self._waiting(roster, lambda: _compat.gloo_group(store, rank, size, self._patience_s))
            self._group = roster.number, IslandGroup(self._gloo, rank, size)
        return self._group[1]

    def _disconnect(self) -> None:
        """Close the connections, so that no other rank waits for this one."""
        if self._gloo is not None:
            _compat.abort(self._gloo)
        self._group = self._gloo = None

    def _reform(self, roster: Roster, *, is_late: bool) -> None:
        """Go on with the islands that live, after a try has failed."""
        self._disconnect()
        if self._watcher is not None:
            before = self._agreements.beats(roster.members)
            self._agreements.propose(roster, self._round, before, is_late=is_late, patience_s=self._hear_s)
        following = self._agreements.next_roster(roster, 2 * self._hear_s)
        if following is None or self.number not in following.members:
            raise JobError(
                f"the other islands have gone on without this one (island {self.number}), which did not answer within "
                f"{self._policy.timeout_s:g} s in round {self._round}; start it again and it enters anew, and raise "
                "timeout_s if it was only slow"
            )
        gone = sorted(set(roster.members) - set(following.members))
        if gone and self._watcher is not None:
            names, how = ", ".join(map(str, gone)), "did not answer in time" if is_late else "are gone"
            warnings.warn(
                f"islands {names} {how}: {len(following.members)} of {len(roster.members)} go on with round "
                f"{self._round}",
                stacklevel=2,
            )
        self._roster = following

    # -- the ranks of this island --------------------------------------------------------------------------------------

    def _open(self, generation: int | None = None) -> Agreements:
        """Agreements with a connection of its own to the rendezvous. Default: of the newest generation."""
        policy = self._policy
        host, port = policy.address
        patience = timedelta(seconds=min(policy.timeout_s, _CONNECT_S))
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=patience)
        except dist.DistError as error:
            raise JobError(
                f"no rendezvous answers at {policy.rendezvous} ({str(error).splitlines()[0]}); start `laconic "
                f"rendezvous --port {port}` on a machine that all islands reach"
            ) from error
        return Agreements(store, self._run, str(policy.rendezvous), generation)


class Entrance:
    """Queues up for an island. For its first rank."""

    def __init__(self, agreements: Agreements, policy: Membership, terms: dict[str, Any]) -> None:
        """Take the terms that all islands must share."""
        self._agreements, self._policy, self._terms = agreements, policy, terms
        self._begun, self._has_warned = time.monotonic(), False
        self._number: int | None = None

    def wait(self, patience_s: float) -> list[int] | None:
        """Wait for `patience_s`. Returns the generation and the number of this island once it is a member, else None.

        Raises:
            JobError: the other islands have other terms, or none of them has come within `start_timeout_s`.
        """
        number = self._queue_up() if self._number is None else self._number
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._agreements.welcome(number) is not None:
                return [self._agreements.generation, number]
            number = self._look_around(number)
            time.sleep(_WATCH_S)
        return None

    def _queue_up(self) -> int:
        """Come, and found the run as the last of the founders. Returns this island's number."""
        self._agreements.agree_on(self._terms)
        self._number = self._agreements.come()
        if self._number == self._policy.num_founders - 1:
            self._agreements.found(self._policy.num_founders)
        return self._number

    def _look_around(self, number: int) -> int:
        """Answer calls; leave a generation that has died out; say that this island waits, or give up.

        Returns this island's number.
        """
        self._agreements.look_for_end()
        self._agreements.answer(number)
        is_founded = self._agreements.num_come() >= self._policy.num_founders
        if is_founded and self._agreements.silent_s() > SILENCE_S:  # [Note: A run that has ended]
            self._agreements.begin_generation()
            number = self._queue_up()
        waited_s = time.monotonic() - self._begun
        if waited_s > self._policy.start_timeout_s:
            raise JobError(f"{self._missing()} after {waited_s:.0f} s; start the others, or set `islands` lower")
        if waited_s > _NOTICE_S and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self._missing()}; this island waits", stacklevel=2)
        return number

    def _missing(self) -> str:
        come, islands = self._agreements.num_come(), self._policy.num_founders
        if come < islands:
            return f"{come} of {islands} islands have come to {self._policy.rendezvous}"
        return f"the islands at {self._policy.rendezvous} have not ended a round since this one came"


class _Watcher:
    """A thread of an island's first rank, which gives signs of life and listens while the rank computes."""

    def __init__(self, agreements: Agreements, number: int) -> None:
        self._agreements, self._number = agreements, number
        self.end: RunEndedError | None = None
        """The error of the run, once an island has ended it."""
        self.over = threading.Event()
        """Set to let the thread end soon."""
        self.thread = threading.Thread(target=self._run, name="laconic-islands-watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        beaten_at = 0.0
        try:
            while not self.over.wait(_WATCH_S):
                self._agreements.look_for_end()
                if time.monotonic() - beaten_at >= BEAT_S:
                    self._agreements.beat(self._number)
                    beaten_at = time.monotonic()
        except RunEndedError as error:
            self.end = error
        except JobError:  # the store is gone; the next sync says so
            pass


_entered: weakref.WeakSet[ElasticExchange] = weakref.WeakSet()


@cache  # once, and only now: what was registered before, such as the end of process groups, runs after it
def _leave_at_exit() -> None:
    atexit.register(_leave)


def _leave() -> None:
    """Go in order as the process ends."""
    for exchange in list(_entered):
        with contextlib.suppress(JobError):
            exchange.leave()


def _fill(vectors: Sequence[Tensor], heard: Sequence[Tensor]) -> None:
    """Copy what an island has heard into its vectors; nothing if it was no listener."""
    for vector, value in zip(vectors, heard, strict=False):
        vector.copy_(value)
