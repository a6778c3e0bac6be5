"""The syncs of islands that come and go while the others train on.

[Note: Islands that come and go]
Each island is a job of its own: its ranks have a process group of their own, so the end of an island ends no rank of
another. Islands meet in a store that none of them hosts, where they agree on their members and on every sync:
[Note: One verdict] in agreements.py. Values go straight from island to island, over a Gloo group for each roster and
each place in an island, as in torchft (github.com/meta-pytorch/torchft). torch's groups cannot lose a member, so a new
roster makes a new group.

An island that dies closes its connections, and the others' try of the round fails at once; one that is stuck or cut off
lets it time out. The others wait some seconds for all that live to register, go on as the next roster, and repeat the
round. Each rank still has its pseudo-gradient, so no island loses a step. The exchange runs in the background thread,
so training stands still only when the round's mean is due.

[Note: Coming]
An island that comes enters at the end of a round. From the next round on it is a member that weighs nothing, and takes
part in exchanges while it waits for the state. One of the others, the lead, copies the outer state right after it has
applied the mean of that round, and sends the copy in a thread of its own while it trains on. When the state has arrived
the newcomer applies the means of the rounds since, in order, and so has the same bits as the others. It begins to
train at the end of a round, in step with the others. Its inner optimizer starts afresh.

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
from concurrent.futures import wait
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.codec import Codec
from laconic.comm.agreement import ranks_or_self
from laconic.comm.cluster import Cluster
from laconic.errors import JobError
from laconic.islands.agreements import BEAT_S, NO_ROSTER, SILENCE_S, Agreements, Outcome, Roster, RunEndedError, Verdict
from laconic.islands.all_reduce import IslandGroup, Mean, mean_over_islands
from laconic.islands.entrance import Entrance, Listening, in_thread, pair, tell, vector_checksums
from laconic.islands.exchange import Beginning, Contribution, Exchange, diverged
from laconic.islands.fragments import SyncSchedule
from laconic.islands.outer_optimizer import OuterFragment, layout_digest
from laconic.islands.policies import Membership

_T = TypeVar("_T")

_REGISTER_S = 15.0  # at most, for living islands to register: their threads may have to wait for the interpreter
_WATCH_S = 0.2
_CONNECT_S = 30.0
_MOST_TRIES = 8  # of a round, whose members are the same
_HEAR_S = 5.0  # between two messages of an island's ranks, while they wait to enter


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
            "what islands tell": "steps",  # earlier releases tell more
            "bytes of 4,096 values": codec.payload_bytes(4096),  # islands of two releases may code otherwise
        }
        self._ranks = ranks_or_self(cluster.flag_group)
        self._shard = self._ranks.rank
        self._agreements = self._open()
        self._roster = NO_ROSTER
        self._group: tuple[int, IslandGroup] | None = None
        self._gloo: dist.ProcessGroup | None = None
        self._round = 0  # of the background thread
        self._lead = -1
        self._number = -1
        self._watcher: _Watcher | None = None
        self._tellers: dict[str, threading.Thread] = {}
        """The threads that tell newcomers the state, by the keys of their connections."""

    @property
    def _register_s(self) -> float:
        """The time for living islands to register, after a try has failed."""
        return min(_REGISTER_S, self._policy.timeout_s / 4)

    @property
    def _patience_s(self) -> float:
        """The time for a try. Both together are the timeout, less what the agreement itself may take."""
        return 0.95 * self._policy.timeout_s - self._register_s

    @property
    def number(self) -> int:
        """See `Exchange.number`."""
        return self._number

    @property
    def slot(self) -> int:
        """See `Exchange.slot`."""
        return self._roster.slots[self._roster.members.index(self._number)] if self.is_inside else -1

    # -- coming and going: [Note: Coming] ------------------------------------------------------------------------------

    def enter(self, steps: int) -> Beginning:
        """See `Exchange.enter`. Waits for the founding islands or for the end of a round, and for the state.

        Blocks for `start_timeout_s` at most.

        Raises:
            JobError: too few islands have come, the others have other settings, the island that tells the state has
                died, or the store has a damaged entry.
        """
        self._create_state()
        generation, number = self._wait_outside(self._schedule.rounds(steps))
        self._agreements = self._open(generation)
        roster = self._agreements.welcome(number)
        assert roster is not None
        self._number, self._roster, self._round = number, roster, roster.round
        self.is_inside = True
        if self._ranks.rank == 0:
            self._watcher = _Watcher(self._open(generation), number, roster)
            weakref.finalize(self, self._watcher.stop).atexit = False
        _entered.add(self)
        _leave_at_exit()
        if roster.lead == number:
            self._tell(roster.newcomers, steps)
            return Beginning(steps=steps, is_news=False)
        return self._take_over(roster, steps)

    def _take_over(self, roster: Roster, steps: int) -> Beginning:
        """Get the state that the lead of a roster tells, and the means of the rounds since."""
        vectors = self._vectors()
        before = vector_checksums(vectors)
        link = self._link_to(self._number)
        state = Listening(self._open(self._agreements.generation), link, vectors, self._policy.start_timeout_s)
        means = () if roster.number == 0 else self._listen(state, roster)
        self._wait_for(lambda: self._has_come(state), (roster.lead,))
        told = state.steps
        is_known = self._on_all_ranks(not means and told == steps and before == vector_checksums(vectors))
        return Beginning(steps=told, is_news=not is_known, means=means)

    def _wait_outside(self, rounds: int) -> list[int]:
        """Wait until this island is a member. Returns its generation and its number."""
        entrance = Entrance(self._agreements, self._policy, self._terms, rounds)
        while True:  # the ranks hear from each other now and then, as their groups have timeouts
            found = self._ranks.on_rank_0(lambda: entrance.wait(_HEAR_S), "this island cannot enter")
            if found is not None:
                return found

    def _listen(self, state: Listening, entered: Roster) -> tuple[Mean, ...]:
        """Take part in rounds without a weight until the state has arrived, and return their means.

        The islands that have `entered` with this one, or later, begin no round: they listen, too.
        """
        means: list[Mean] = []
        while not means or not self._on_all_ranks(self._has_come(state)):
            if means and entered.lead not in self._roster.members:
                raise JobError(f"island {entered.lead} died while it told this one the state; start this island again")
            others = {number for number in self._roster.members if number < self._number} - {*entered.newcomers}
            self._wait_for(self._has_begun, sorted(others))  # they may be far away, and a try has a timeout
            fragment = self._round % len(self._fragments)
            nothing = torch.zeros_like(self._fragments[fragment].flat)
            means.append(self.mean(Contribution(fragment=fragment, step=0, values=nothing)))
        return tuple(means)

    def _has_come(self, state: Listening) -> bool:
        """Whether the state has arrived. Raises: JobError if it never will."""
        if not state.has_arrived and self._agreements.is_untold(self._link_to(self._number)):
            raise JobError("the island that tells this one the state cannot reach it; start this island again")
        return state.has_arrived

    def _has_begun(self) -> bool:
        """Whether another island has begun the next round."""
        return self._agreements.has_begun(self._roster, self._round) or self._agreements.is_over(self._roster)

    def _wait_for(self, condition: Callable[[], bool], others: Sequence[int]) -> None:
        """Wait for what other islands do, while any of them gives a sign of life. Raises: JobError."""
        beats, heard_at = [-1], time.monotonic()
        while not condition():
            self._agreements.look_for_end()
            now = self._agreements.beats(others)
            if now != beats:
                beats, heard_at = now, time.monotonic()
            if time.monotonic() - heard_at > SILENCE_S:
                names = ", ".join(map(str, others)) or "that train"
                raise JobError(f"islands {names} have given no sign of life for {SILENCE_S:g} s; start this one again")
            time.sleep(_WATCH_S)

    def _on_all_ranks(self, flag: bool) -> bool:
        return all(self._ranks.gather(flag))

    def keep(self, mean: Mean, steps: int, fragment: int, *, is_whole: bool) -> None:
        """See `Exchange.keep`: the newcomers of the round hear the state."""
        self._tell(mean.newcomers, steps)

    def _tell(self, newcomers: Sequence[int], steps: int) -> None:
        """Tell newcomers the state, in a thread, while this island trains on. Copies the vectors first."""
        if not newcomers:
            return
        copies = [vector.clone() for vector in self._vectors()]
        for number in newcomers:
            link = self._link_to(number)
            arguments = (self._open(self._agreements.generation), link, steps, copies)
            self._tellers[link] = threading.Thread(
                target=self._tell_one, args=arguments, name="laconic-tells", daemon=True
            )
            self._tellers[link].start()

    def _tell_one(self, agreements: Agreements, link: str, steps: int, vectors: Sequence[Tensor]) -> None:
        try:
            tell(pair(agreements.store, link, 0, self._policy.start_timeout_s), steps, vectors)
        except RuntimeError:  # the newcomer has died; nothing depends on it
            with contextlib.suppress(JobError):
                agreements.note_untold(link)

    def _link_to(self, number: int) -> str:
        """The key of the connection over which a newcomer's rank at this place receives the state."""
        return f"tell/{number}/{self._shard}"

    def leave(self) -> None:
        """See `Exchange.leave`."""
        if not self.is_inside:
            return
        try:
            self._finish_telling()
        finally:
            if self._watcher is not None:
                self._watcher.end()
            number, self._number, self.is_inside = self._number, -1, False
        if self._watcher is not None:
            self._agreements.leave(number)

    def _finish_telling(self) -> None:
        deadline = time.monotonic() + self._policy.timeout_s
        for link, teller in self._tellers.items():
            while teller.is_alive() and time.monotonic() < deadline and not self._agreements.is_untold(link):
                self._agreements.look_for_end()
                teller.join(_WATCH_S)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See `Exchange.look`. Raises: RunEndedError if an island has ended the run."""
        if self._watcher is not None:
            self._watcher.raise_end()

    def mean(self, own: Contribution) -> Mean:
        """Return the mean of all islands' contributions. Collective over the members, in the background thread.

        An island whose values are not finite takes part with zeros that weigh nothing, and fails then. The others go
        on without it.

        Raises:
            JobError: the values of this island are not finite; the others have gone on without it; the rendezvous does
                not answer, or has a damaged entry; or every try has failed.
        """
        if not own.is_sound:
            own = replace(own, values=torch.zeros_like(own.values), tokens=0)
        tries = 0
        while True:
            roster = self._roster
            mean, outcome, error = self._try(roster, own)
            verdict = self._vote(roster, outcome)
            if verdict.outcome is Outcome.DONE:
                break
            self._reform(roster, is_late=verdict.outcome is Outcome.LATE)
            tries = tries + 1 if set(self._roster.members) == set(roster.members) else 0
            if tries == _MOST_TRIES or (tries and verdict.outcome is Outcome.LATE):
                raise self._stalled(error)
        assert mean is not None
        self._round += 1
        if verdict.newcomers:
            self._set_roster(self._agreements.enlarge(roster, verdict.newcomers, self._round, self._lead))
        if not own.is_sound:
            raise diverged(own, "this island; the others go on without it")
        return replace(mean, newcomers=verdict.newcomers if self._number == self._lead else ())

    def _try(self, roster: Roster, own: Contribution) -> tuple[Mean | None, Outcome, RuntimeError | None]:
        """Try the round once, among the members of a roster."""
        if self._watcher is not None:
            self._agreements.arrive(roster, self._round, self._number)
        if self._agreements.is_over(roster):
            return None, Outcome.LOST, None
        try:
            islands = self._connect(roster)
            tokens, mean = self._waiting(roster, lambda: self._reduce(islands, own))
            self._lead = min((n for n, told in zip(roster.members, tokens, strict=True) if told), default=-1)
            return mean, Outcome.DONE, None
        except RuntimeError as error:  # torch has no class for a lost connection that all its backends raise
            is_late = any(word in str(error).lower() for word in ("timed out", "timeout"))
            return None, Outcome.LATE if is_late else Outcome.LOST, error

    def _reduce(self, islands: IslandGroup, own: Contribution) -> tuple[list[int], Mean]:
        tokens = [told for (told,) in islands.gather(own.tokens)]
        return tokens, mean_over_islands(own.values, islands, self._codec, self._cluster.traffic, weights=tokens)

    def _waiting(self, roster: Roster, action: Callable[[], _T]) -> _T:
        """Run what may wait for the other members: [Note: Waits that end].

        Raises:
            RuntimeError: the roster has failed, so the others do not come; or `action` raised it.
            RunEndedError: an island has ended the run.
        """
        result = in_thread(action, "laconic-try")
        while not wait([result], _WATCH_S).done:
            self._agreements.look_for_end()
            if self._agreements.is_over(roster):
                raise RuntimeError(f"the islands have given roster {roster.number} up")
        return result.result()

    def _connect(self, roster: Roster) -> IslandGroup:
        """The members' ranks at this place, connected."""
        if self._group is None or self._group[0] != roster.number:
            self._disconnect()
            rank, size = roster.members.index(self._number), len(roster.members)
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

    def _vote(self, roster: Roster, outcome: Outcome) -> Verdict:
        num_ranks = len(roster.members) * self._ranks.size
        return self._agreements.vote(roster, self._round, outcome, num_ranks=num_ranks, patience_s=self._patience_s)

    def _reform(self, roster: Roster, *, is_late: bool) -> None:
        """Go on with the islands that live, after a try has failed."""
        self._disconnect()
        self._agreements.end(roster)
        if self._watcher is not None:
            self._agreements.register(roster, self._number)
            self._agreements.propose(roster, self._round, is_late=is_late, patience_s=self._register_s)
        following = self._agreements.next_roster(roster, 2 * self._register_s)
        if following is None or self._number not in following.members:
            raise JobError(
                f"the other islands have gone on without this one (island {self._number}), which did not answer within "
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
        self._set_roster(following)

    def _set_roster(self, roster: Roster) -> None:
        self._roster = roster
        if self._watcher is not None:
            self._watcher.roster = roster

    def _stalled(self, error: Exception | None) -> JobError:
        living = len(self._roster.members)
        return JobError(
            f"round {self._round} of the islands has failed again and again, although all {living} live "
            f"({error}); raise timeout_s={self._policy.timeout_s:g} above the seconds that a message takes, and see "
            "whether each island can reach all others (GLOO_SOCKET_IFNAME names the network to use)"
        )

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


class _Watcher:
    """A thread of an island's first rank, which answers for it while the rank computes."""

    def __init__(self, agreements: Agreements, number: int, roster: Roster) -> None:
        self._agreements, self._number = agreements, number
        self.roster = roster
        """The present roster."""
        self._end: RunEndedError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-islands-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end soon."""
        self._over.set()

    def raise_end(self) -> None:
        """Raise RunEndedError if this thread has heard that an island has ended the run."""
        if self._end is not None:
            raise self._end

    def end(self) -> None:
        """End the thread."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        beaten_at = 0.0
        try:
            while not self._over.wait(_WATCH_S):
                self._agreements.look_for_end()
                if time.monotonic() - beaten_at >= BEAT_S:
                    self._agreements.beat(self._number)
                    beaten_at = time.monotonic()
                roster = self.roster
                if self._agreements.is_over(roster):
                    self._agreements.register(roster, self._number)
        except RunEndedError as error:
            self._end = error
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
