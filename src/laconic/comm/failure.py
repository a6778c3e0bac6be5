"""The first failure of a job, which every rank shows, and the end of ranks that would wait for a lost one.

[Note: Failing together]
An unforeseen error ends one rank in the middle of a step, or the system kills it. The other ranks then hang in a
collective or fail because a connection closes, and their messages bury the cause. So each rank has a thread that
watches its neighbours: [Note: A ring of connections] in ring.py. A rank that an exception ends tells the others its
traceback. If a rank ends without a word, its neighbours tell the others. Every rank shows the first failure that it
hears of. A rank that does not fail by itself within five seconds exits with code 1: within ten seconds after the
failure, which include the time to find out. A rank that does fail has five seconds more, for its own traceback. If
ranks are gone but none has failed, a rank goes on until it waits for others, since the lost ones may have done all
their work.

Ranks watch each other before they make their first process group. While Gloo connects the ranks of a group, it waits
five times as long for a rank as the group's timeout says. A rank that dies before it has published where it is is
known to nobody but its launcher, so the first group has a bound of its own: `ending_after`.

The groups' timeout bounds all other waits, such as those for a rank in an endless loop. Where NCCL waits on the device,
torch's own watchdog ends the process after the same time. `lab/worker.py` shows first failures too, of any script, and
uses a file.

Of a JobError the others learn the message alone, without a traceback. One rank may raise it where the others do not:
a loss that is not finite on one island, for example, is unknown to the other islands. Then they raise a JobError with
this message, too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

import torch.distributed as dist

from laconic.comm.groups import has_peers
from laconic.comm.journal import here
from laconic.comm.ring import PeerMessage, PeerRing
from laconic.errors import JobError

_PEER_TIMEOUT_S = 60.0
_INTERVAL_S = 5.0  # between two looks at this process while all goes well
_GRACE_S = 5.0  # for a rank to fail by itself, once another rank has failed; then for it to show why
_CAUSE_S = 1.0  # for the news of a cause to arrive before the error that it causes is taken for the first
_ANSWER_S = 5.0  # for the thread to end
_MOST_CHARACTERS = 100_000  # of a traceback


class PeerFailedError(RuntimeError):
    """Another rank failed first; the message is the traceback of that rank."""


def set_peer_timeout(timeout_s: float) -> None:
    """Set after how many seconds without a sign of its machine a rank is gone; 0 means that ranks do not watch.

    Default: 60. A process that dies on a living machine is noticed at once. Call it on all ranks, before the first call
    of `fully_shard` or of anything else that makes a `Cluster`.
    """
    global _peer_timeout_s
    _peer_timeout_s = timeout_s


def watch_peers() -> None:
    """Start the thread of [Note: Failing together] for the default process group, unless it runs already.

    Also let a rank that an exception ends tell the others: it wraps `sys.excepthook`, as torch.distributed does.
    """
    world = dist.group.WORLD
    if world is None or not has_peers(world) or not _may_watch(dist.get_world_size()):
        return
    if _peers is None or not _peers.is_current():
        store = dist.distributed_c10d._get_default_store()
        watch_peers_early(store, dist.get_rank(), dist.get_world_size())
    assert _peers is not None
    _peers.adopt(world)


def watch_peers_early(store: dist.Store, rank: int, num_ranks: int) -> None:
    """Start the thread before there is a process group, for the group that will be the default one.

    The ranks meet in `store`. Call `watch_peers` when the group is made.
    """
    global _peers
    if not _may_watch(num_ranks):
        return
    if _peers is None:
        atexit.register(leave)
        os.register_at_fork(after_in_child=_forget)
        sys.excepthook = _telling(sys.excepthook)
    else:
        _peers.end()
    _peers = _Peers(store, rank, num_ranks, _peer_timeout_s)


def leave() -> None:
    """Tell the other ranks that this one ends in order, or leaves the default process group."""
    if _peers is not None:
        _peers.end()


def record_failure(error: BaseException) -> str:
    """Tell the other ranks that `error` ends this one. Returns the first failure if another rank had it, else ""."""
    return "" if _peers is None else _peers.fail(error)


def first_failure(*, patience_s: float = 0.0) -> str:
    """Return the first failure of the job if another rank had it, else "". The news may take `patience_s` to arrive."""
    return "" if _peers is None else _peers.first_of_others(patience_s)


def first_failure_behind(error: BaseException) -> str:
    """Return the first failure of another rank, from which the error of a transfer may follow; else ""."""
    return first_failure(patience_s=0.0 if _is_timeout(error) else _CAUSE_S)


@contextlib.contextmanager
def ending_after(seconds: float, waited_for: str) -> Iterator[None]:
    """End this process with code 1 and one line if the block takes `seconds` and the grace of this module."""

    def end() -> None:
        print(
            f"rank {os.environ.get('RANK', '?')} has waited {seconds + _GRACE_S:.1f} s for {waited_for}: another rank "
            "has died in its first seconds, or cannot be reached; look at what the other ranks have printed",
            file=sys.__stderr__ or sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(1)

    timer = threading.Timer(seconds + _GRACE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def failing_together(world_size: int) -> Iterator[None]:
    """Show the traceback of the first failing rank on every rank: [Note: Failing together].

    Within the block a rank that is gone counts as failed, so the others end within 10 seconds. The exit code of one
    that hangs is 2 after a JobError, else 1.

    Raises:
        PeerFailedError: the block failed on this rank, but first on another rank. A JobError is raised as it is.
        JobError: the block failed on this rank, but first on another rank with this message.
    """
    if world_size == 1:
        yield
        return
    watch_peers()
    if _peers is not None:
        _peers.all_are_needed = True
    try:
        yield
    except Exception as error:
        first = record_failure(error)
        if first and not isinstance(error, JobError):
            raise (JobError(_mistake(first)) if _mistake(first) else PeerFailedError(first)) from None
        raise
    finally:
        if _peers is not None:
            _peers.all_are_needed = False


_peer_timeout_s = _PEER_TIMEOUT_S
_peers: _Peers | None = None


def _may_watch(num_ranks: int) -> bool:
    is_main = threading.current_thread() is threading.main_thread()  # threads that play ranks share one memory
    return num_ranks > 1 and _peer_timeout_s > 0 and is_main


def _forget() -> None:
    """Close the connections in a fork, so that they end when the rank ends."""
    global _peers
    if _peers is not None:
        _peers.ring.abandon()
        _peers = None


def _mistake(first: str) -> str:
    """The message of the first failure if it was a JobError, else ""."""
    _, _, told = first.partition("failed first:")
    return told.removeprefix(" ") if told.startswith(" ") else ""


def _is_timeout(error: BaseException) -> bool:
    """True if a transfer took too long, although its other end lives. torch has no class for it on all backends."""
    return "timed out" in str(error).lower()


def _telling(before: Any) -> Any:
    """A hook that tells the other ranks of the exception that ends this one, and shows the first failure below it."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = "" if isinstance(error, KeyboardInterrupt) else record_failure(error)
        before(kind, error, trace)
        is_shown = isinstance(error, PeerFailedError) or first in getattr(error, "__notes__", [])
        is_alike = first.rstrip().endswith(traceback.format_exception_only(error)[-1].rstrip())
        if first and not is_shown and not is_alike:
            print(f"rank {dist.get_rank() if dist.is_initialized() else '?'} failed because {first}", file=sys.stderr)

    return hook


class _Peers:
    """The thread in which this rank is part of the ring."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, patience_s: float) -> None:
        self.all_are_needed = False
        self._world: weakref.ref[dist.ProcessGroup] | None = None  # None as long as the default group is not made
        self._host_waits = True
        self._rank = rank
        self._failing_since = 0.0  # the time at which this rank began to fail
        self._is_over = False
        # a clone has a connection of its own, so the thread never waits behind a blocking call of the main thread
        self.ring = PeerRing(store.clone(), rank, num_ranks, patience_s)  # type: ignore[attr-defined]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="laconic-peers", daemon=True)
        self._thread.start()

    def adopt(self, world: dist.ProcessGroup) -> None:
        """Watch the ranks of the default process group until it is destroyed."""
        self._world, self._host_waits = weakref.ref(world), dist.get_backend(world) == "gloo"

    def is_current(self) -> bool:
        """Return whether the default process group is the one of this thread, or is still to come."""
        return self._world is None or (self._world() is not None and self._world() is dist.group.WORLD)

    def first_of_others(self, patience_s: float = 0.0) -> str:
        """Return the first failure, if another rank had it. Wait for news for `patience_s`."""
        if not self._is_over:
            self.ring.has_heard.wait(patience_s)
        first = self.ring.first
        return "" if first is None or first.rank == self._rank else first.text

    def fail(self, error: BaseException) -> str:
        """Tell the others of this rank's end. Returns the first failure, if another rank had it."""
        if self._is_over:
            return self.first_of_others()
        self._failing_since = time.monotonic()
        if isinstance(error, RuntimeError) and not _is_timeout(error):  # perhaps a transfer lost its other end
            self.ring.has_heard.wait(_CAUSE_S)
        trace = "\n" + "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:]
        text = f"rank {self._rank} failed first:" + (f" {error}" if isinstance(error, JobError) else trace)
        telling = self.ring.tell(PeerMessage(rank=self._rank, text=text, has_failed=True))
        with contextlib.suppress(TimeoutError, CancelledError):  # there is no neighbour, or the thread has just ended
            asyncio.run_coroutine_threadsafe(telling, self._loop).result(_CAUSE_S)
        return self.first_of_others()

    def end(self) -> None:
        """Say goodbye, and end the thread."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self.ring.has_news.set)
        self._thread.join(_ANSWER_S)  # a thread that returns from C++ while the interpreter ends aborts the process

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        """Be part of the ring until `end`, or until the process group is destroyed."""
        ring = asyncio.create_task(self.ring.live())
        await asyncio.sleep(0)  # it begins, or it would not say goodbye
        events, since, heard_s = here.events, time.monotonic(), 0.0
        while not self._is_over and self.is_current():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ring.has_news.wait(), _GRACE_S / 20 if heard_s else _INTERVAL_S)
            self.ring.has_news.clear()
            if events != here.events:
                events, since = here.events, time.monotonic()
            first = self.ring.first
            if first is not None and first.rank != self._rank:
                heard_s = heard_s or time.monotonic()
                self._end_if_stuck(first, heard_s, since)
        self._is_over = True
        ring.cancel()
        await asyncio.wait([ring])

    def _end_if_stuck(self, first: PeerMessage, heard_s: float, since: float) -> None:
        """End the process if it has not failed by itself: another rank has. `since` is the time of the last event."""
        must_end = first.has_failed or self.all_are_needed
        waits = bool(here.waits) or not self._host_waits
        begun_s = max(heard_s, self._failing_since, 0.0 if must_end else since)
        if (must_end or waits) and time.monotonic() - begun_s > _GRACE_S and not self._is_over:
            # torch's hook puts a buffer in place of sys.stderr while it makes a traceback
            print(f"rank {self._rank} is stuck because {first.text}", file=sys.__stderr__ or sys.stderr, flush=True)
            os._exit(2 if _mistake(first.text) else 1)
