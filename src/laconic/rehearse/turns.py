"""Threads of one process that take turns, on a clock that nobody waits for.

[Note: Turns]
A player is a thread that runs until it waits: for a transfer, a lock, another thread, or for time to pass. Then it
hands on. So one player runs at a time, and changes of turn happen at waits alone. The next player is the next one, in
the order of their numbers, whose wait is over. So a program has one order, and the same result each time. A seed
chooses another order, which is the same each time, too.

Where no wait is over, the clock goes on to the moment at which the first wait ends by its time-out. So a wait of an
hour takes no time. Where no wait has a time-out, nobody can ever go on: a deadlock, known at once.

Threads that a player starts are players, too: blocking.py lends them locks and clocks of the turns.
"""

from __future__ import annotations

import _thread
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from laconic import _compat

_TICK_S = 1e-6  # the clock goes on by so much each time that a player reads it, or no work would take any time


class DeadlockError(RuntimeError):
    """Nobody can go on; the message says who waits for which transfer."""


class Stopped(BaseException):
    """Ends a player because its rank has died, or because the run is over. No `except Exception` catches it."""


_IDLE = 0.01
"""A run that takes a smaller share of a processor waits for something real."""


def held_lock() -> Any:
    """A lock of Python's own, which is held: who acquires it waits until somebody releases it."""
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class PlayingThread:
    """A thread that takes turns."""

    turns: Turns
    rank: int
    name: str
    is_helper: bool = False
    """True for a thread that a rank has started. A run is over when all others are."""
    is_daemon: bool = False
    """True for a helper that does not keep its rank's process alive."""
    awaited: str = ""
    """The awaited transfer, lock or time, in words."""
    is_over: bool = False
    until: Callable[[], Any] | None = None
    deadline_s: float | None = None
    has_come: bool = False
    """True if what the player waited for has come, and not the deadline."""
    turn: Any = field(default_factory=held_lock)
    """Released when it is this player's turn."""


_here = threading.local()


def player() -> PlayingThread | None:
    """The player that runs this code; None if another thread does."""
    return getattr(_here, "player", None)


@contextmanager
def no_player() -> Iterator[PlayingThread | None]:
    """Let this thread be none of the players in the body: its waits are real. Yields the player that it was."""
    me, _here.player = player(), None
    try:
        yield me
    finally:
        _here.player = me


class Turns:
    """Who may run: [Note: Turns]."""

    def __init__(
        self,
        *,
        change: Callable[[int, int], None] = lambda before, after: None,
        begin_thread: Callable[[int], None] = lambda rank: None,
        at_turn: Callable[[int], None] = lambda rank: None,
        seed: int | None = None,
    ) -> None:
        """Make turns without players.

        Args:
            change: called with two ranks when the turn goes from a player of the first to one of the second.
            begin_thread: called with its rank on a thread that a rank has started.
            at_turn: called with its rank when a player has got a turn; it may raise.
            seed: of the order of turns. None: the next one in the order of their numbers.
        """
        self.players: list[PlayingThread] = []
        self.clock_s = 0.0
        self.dead: set[int] = set()
        """The ranks whose players get no turn any more, but to end."""
        self.failure: BaseException | None = None
        """Why nobody shall go on."""
        self._change, self._begin_thread, self._at_turn = change, begin_thread, at_turn
        self._random = None if seed is None else random.Random(seed)
        self._over = held_lock()

    # -- the players' side -----------------------------------------------------------------------------------------

    def wait(self, until: Callable[[], Any], awaited: str, seconds: float | None = None) -> bool:
        """Hand on until `until()` is true, or for so many seconds of the clock. Returns whether it is true.

        `until` is called again and again, by other players, until it has returned something true once.

        Raises:
            DeadlockError: nobody can go on.
            Stopped: this player's rank has died, or the run is over.
        """
        me = player()
        if me is None:
            raise RuntimeError(f"a thread that was not started by a rank's own code waits for {awaited}")
        self._stop_if_over(me)
        if until():
            return True
        if seconds is not None and seconds <= 0:
            return False
        me.until, me.awaited = until, awaited
        me.deadline_s = None if seconds is None else self.clock_s + seconds
        chosen = self._hand_on(me)
        if chosen is not me:
            me.turn.acquire()
        me.until, me.awaited = None, ""
        self._stop_if_over(me)
        self._at_turn(me.rank)
        return me.has_come

    def read_clock(self) -> float:
        """Seconds since the beginning; each reading takes one more microsecond."""
        self.clock_s += _TICK_S
        return self.clock_s

    def sleep(self, seconds: float) -> None:
        """Hand on for so many seconds of the clock."""
        self.wait(lambda: False, f"{seconds:g} s to pass", seconds)

    def die(self, rank: int) -> None:
        """Let the players of a rank have no turn any more, and end this one, if it is one of them."""
        self.dead.add(rank)
        me = player()
        if me is not None:
            self._stop_if_over(me)

    def is_gone(self, rank: int) -> bool:
        """True if a rank has died, or its process would have ended: all its players are over, but for daemons."""
        return rank in self.dead or all(
            each.is_over for each in self.players if each.rank == rank and not each.is_daemon
        )

    def _must_end(self, each: PlayingThread) -> bool:
        return each.rank in self.dead or (each.is_daemon and self.is_gone(each.rank))

    def _stop_if_over(self, me: PlayingThread) -> None:
        if self.failure is not None:
            raise (
                DeadlockError(str(self.failure))
                if isinstance(self.failure, DeadlockError) and not me.is_helper
                else Stopped
            )
        if self._must_end(me) or (me.is_helper and self._are_ranks_over()):
            raise Stopped

    def _are_ranks_over(self) -> bool:
        return all(each.is_over for each in self.players if not each.is_helper)

    # -- whose turn it is ------------------------------------------------------------------------------------------

    def _hand_on(self, me: PlayingThread) -> PlayingThread | None:
        """Let the next player run; this thread runs on only to wait for its next turn, or to end."""
        chosen = self._choose(me)
        if chosen is None:
            self._over.release()
            return None
        if chosen.rank != me.rank:
            self._change(me.rank, chosen.rank)
        if chosen is not me:
            chosen.turn.release()
        return chosen

    def _choose(self, me: PlayingThread) -> PlayingThread | None:
        place = self.players.index(me)
        others = self.players[place + 1 :] + self.players[: place + 1]
        living = [each for each in others if not each.is_over]
        if not living:
            return None
        if self._random is not None:
            self._random.shuffle(living)
        must_end = self.failure is not None or self._are_ranks_over()
        for each in living:
            if must_end or each.until is None or self._must_end(each):
                return each
            if each.until():
                each.has_come = True
                return each
        timed = [each for each in living if each.deadline_s is not None]
        if timed:
            chosen = min(timed, key=lambda each: (each.deadline_s, self.players.index(each)))
            assert chosen.deadline_s is not None
            self.clock_s, chosen.has_come = max(self.clock_s, chosen.deadline_s), False
            return chosen
        ordered = [each for each in self.players if not each.is_over]
        lines = "; ".join(f"{each.name} waits for {each.awaited}" for each in ordered if not each.is_helper)
        over = ", ".join(each.name for each in self.players if each.is_over and not each.is_helper)
        self.failure = DeadlockError(f"no rank can go on: {lines}" + (f"; {over} ended before" if over else ""))
        return next((each for each in ordered if not each.is_helper), ordered[0])

    # -- beginning and end -----------------------------------------------------------------------------------------

    def add(
        self, rank: int, name: str, body: Callable[[], Any], *, is_helper: bool = False, is_daemon: bool = False
    ) -> Callable[[], None]:
        """Add a player. Returns the function that its thread calls."""
        new = PlayingThread(self, rank, name, is_helper, is_daemon)
        self.players.append(new)

        def play() -> None:
            new.turn.acquire()
            _here.player = new
            try:
                if is_helper:
                    self._begin_thread(rank)
                self._stop_if_over(new)
                self._at_turn(rank)
                body()
            except Stopped:
                pass
            finally:
                new.is_over, _here.player = True, None
                self._hand_on(new)

        return play

    def fail(self, failure: BaseException) -> None:
        """Let all players end, one after the other: `failure` is the first of all."""
        if self.failure is None:
            self.failure = failure

    def run(self, bodies: list[Callable[[], Any]], *, timeout_s: float) -> None:
        """Play one body for each rank, and return when all have ended.

        Raises:
            TimeoutError: the bodies have taken `timeout_s` of the processors, or none of them for so long.
        """
        _compat.keep_device_guard()
        with no_player():
            plays = [self.add(rank, f"rank {rank}", body) for rank, body in enumerate(bodies)]
            threads = [
                threading.Thread(target=play, name=each.name, daemon=True)
                for each, play in zip(self.players, plays, strict=True)
            ]
            for thread in threads:
                thread.start()
            self._change(-1, 0)
            self.players[0].turn.release()
            try:
                self._wait_for_end(timeout_s)
            except BaseException as error:  # so that the one that runs ends at its next wait, and then the others
                self.fail(error)
                raise
            for thread in threads:
                thread.join()

    def _wait_for_end(self, timeout_s: float) -> None:
        """Wait until the run is over. Seconds of the processors count: others may have the machine for a while."""
        begun_s = seen_s = time.process_time()
        while not self._over.acquire(timeout=timeout_s):
            before_s, seen_s = seen_s, time.process_time()
            if seen_s - begun_s > timeout_s or seen_s - before_s < _IDLE * timeout_s:
                raise TimeoutError(f"the ranks have not ended in {timeout_s:g} s:\n{self._stacks()}")

    @contextmanager
    def alone(self) -> Iterator[PlayingThread]:
        """Let this thread be the only player that is no helper. At the end, the threads that it has started end."""
        me = PlayingThread(self, 0, threading.current_thread().name)
        self.players.append(me)
        with no_player():
            _here.player = me
            try:
                yield me
            finally:
                me.is_over, _here.player = True, None
                if self._hand_on(me) is not None:
                    self._over.acquire()

    def _stacks(self) -> str:
        """Where the players stand that run, and do not wait."""
        frames = sys._current_frames()
        running = {each.name for each in self.players if not each.is_over and each.until is None}
        found = [thread for thread in threading.enumerate() if thread.name in running and thread.ident in frames]
        return "\n".join(
            thread.name + "\n" + "".join(traceback.format_stack(frames[thread.ident])[-8:])  # type: ignore[index]
            for thread in found
        )
