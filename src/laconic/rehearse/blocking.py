"""Locks, threads and clocks for players of turns, in place of Python's own.

[Note: Threads that a player starts]
Python's events, conditions, semaphores, queues, futures and executors all wait for one kind of lock. So inside of
`cooperating` a lock that a player makes is one that hands on its turn where it would block, and all of them do. A
thread that a player starts is a player of the same rank, and joining it is a wait. `time.sleep`, `time.time` and the
other clocks read the clock of the turns. A process that ends or kills itself ends its rank alone.

All of this counts for players: to other threads of the process, locks and clocks do what they always do.
"""

from __future__ import annotations

import _thread
import functools
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from laconic.rehearse.turns import Stopped, Turns, no_player, player

_EPOCH_S = 1.8e9  # what `time.time` says at the beginning
_depth = 0


@contextmanager
def cooperating() -> Iterator[None]:
    """Let players have locks, threads and clocks of their turns: [Note: Threads that a player starts]."""
    global _depth
    _depth += 1
    try:
        with ExitStack() as patches:
            for place, name, value in _replaced() if _depth == 1 else ():
                patches.enter_context(mock.patch.object(place, name, value))
            yield
    finally:
        _depth -= 1


def _replaced() -> list[tuple[Any, str, Any]]:
    thread = threading.Thread
    return [
        (threading, "Lock", _new_lock),
        (threading, "_allocate_lock", _new_lock),
        (threading, "RLock", _of_players(lambda turns: threading._PyRLock(), threading.RLock)),  # type: ignore[attr-defined]
        (logging.getLogger("concurrent.futures"), "filters", [_is_no_end]),
        (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
        (functools.cached_property, "__get__", _cached),
        (thread, "start", _starting(thread.start)),
        (thread, "join", _joining(thread.join)),
        (thread, "is_alive", _living(thread.is_alive)),
        (os, "_exit", _of_players(lambda turns, code: _die(turns), os._exit)),
        (os, "kill", _killing(os.kill)),
        (time, "sleep", _of_players(Turns.sleep, time.sleep)),
        (time, "monotonic", _of_players(Turns.read_clock, time.monotonic)),
        (time, "perf_counter", _of_players(Turns.read_clock, time.perf_counter)),
        (time, "time", _of_players(lambda turns: _EPOCH_S + turns.read_clock(), time.time)),
        (time, "time_ns", _of_players(lambda turns: int((_EPOCH_S + turns.read_clock()) * 1e9), time.time_ns)),
    ]


def _is_no_end(record: logging.LogRecord) -> bool:
    """False for what an executor says of a thread that ends with its rank."""
    return record.exc_info is None or not isinstance(record.exc_info[1], Stopped)


def _of_players(own: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `own`, with the turns before its arguments, for players, and `real` for other threads."""

    def either(*arguments: Any) -> Any:
        me = player()
        return real(*arguments) if me is None else own(me.turns, *arguments)

    return either


def _cached(attribute: Any, instance: Any, owner: Any = None) -> Any:
    """`functools.cached_property.__get__` as from Python 3.12 on: before, all instances of a class share a lock."""
    if instance is None:
        return attribute
    if attribute.attrname not in vars(instance):
        vars(instance)[attribute.attrname] = attribute.func(instance)
    return vars(instance)[attribute.attrname]


def _new_lock() -> Any:
    return _thread.allocate_lock() if player() is None else _Lock()


def _die(turns: Turns) -> None:
    me = player()
    assert me is not None
    turns.die(me.rank)


def _killing(real: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def kill(process: int, number: int) -> None:
        me = player()
        if me is None or process != os.getpid() or number != signal.SIGKILL:
            real(process, number)
        else:
            me.turns.die(me.rank)

    return kill


def _starting(real: Callable[[Any], None]) -> Callable[[Any], None]:
    def start(thread: Any) -> None:
        with no_player() as me:  # what starts a thread waits for real
            if me is not None:
                thread.run = me.turns.add(me.rank, thread.name, thread.run, is_helper=True, is_daemon=thread.daemon)
                thread._laconic_player, thread._started = me.turns.players[-1], threading.Event()
            real(thread)

    return start


def _joining(real: Callable[..., None]) -> Callable[..., None]:
    def join(thread: Any, timeout: float | None = None) -> None:
        me, awaited = player(), getattr(thread, "_laconic_player", None)
        if me is None or awaited is None:
            return real(thread, timeout)
        if not me.turns.wait(lambda: awaited.is_over, f"the thread {thread.name}", timeout):
            return None
        with no_player():
            return real(thread, timeout)

    return join


def _living(real: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_alive(thread: Any) -> bool:
        awaited = getattr(thread, "_laconic_player", None)
        return real(thread) if player() is None or awaited is None else not awaited.is_over

    return is_alive


class _Lock:
    """A lock that hands on where it would block: [Note: Threads that a player starts]."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of `threading.Lock`."""
        if self._lock.acquire(False):
            return True
        me = player()
        if not blocking or me is None:
            return blocking and self._lock.acquire(blocking, timeout)
        return me.turns.wait(lambda: self._lock.acquire(False), "a lock", None if timeout < 0 else timeout)

    def release(self) -> None:
        """As of `threading.Lock`."""
        self._lock.release()

    def locked(self) -> bool:
        """As of `threading.Lock`."""
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock = _thread.allocate_lock()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()
