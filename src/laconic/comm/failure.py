"""The first failure of a job, which every rank shows.

[Note: Failing together]
An unforeseen error ends one rank in the middle of a step. The other ranks then hang in a collective or fail because a
connection closes, and their messages bury the cause. So the first rank that fails writes its traceback to the
rendezvous store. Every other rank reads it there, either when that rank fails too, or in a thread that looks at the
store every few seconds. The rank then shows the first traceback instead of its own and exits. `lab/worker.py` does the
same for any script with a file instead of the store.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from laconic.errors import JobError

_KEY = "laconic/first-failure"
_WATCH_INTERVAL_S = 3.0  # between two looks at the store
_GRACE_S = 10.0  # for a rank to fail by itself, once another rank has failed
_JOIN_S = 5.0  # for the watching thread to end


class PeerFailedError(RuntimeError):
    """Another rank failed first; the message is the traceback of that rank."""


def record_failure(error: BaseException, store: dist.Store | None = None) -> str:
    """Record the traceback of `error` as the first failure of the job, unless there is one.

    All ranks share `store`. Default: the rendezvous store. Returns the first failure if another rank recorded it, else
    "". If the process that hosts the store has died, nothing is recorded and the result is "".
    """
    record = f"{_prefix(dist.get_rank())}\n{''.join(traceback.format_exception(error))}"
    try:
        first = (store or _default_store()).compare_set(_KEY, "", record).decode()
    except Exception:  # whatever a dead store raises must not hide `error`
        return ""
    return _if_of_peer(first)


def first_failure(store: dist.Store | None = None) -> str:
    """Return the first failure of the job if another rank recorded it, else ""; see `record_failure`."""
    store = store or _default_store()
    try:
        return _if_of_peer(store.get(_KEY).decode()) if store.check([_KEY]) else ""
    except Exception:  # the process that hosts the store has died; torch has several errors for that
        return ""


@contextlib.contextmanager
def failing_together(world_size: int) -> Iterator[None]:
    """Show the traceback of the first failing rank on every rank: [Note: Failing together].

    A rank that hangs exits with code 1 at most 13 seconds after the first failure.

    Raises:
        PeerFailedError: the block failed on this rank, but first on another rank. A JobError is raised as it is.
    """
    if world_size == 1:
        yield
        return
    done = threading.Event()
    # a clone has a connection of its own, so the thread never waits behind a blocking call of the main thread
    watched = _default_store().clone()  # type: ignore[attr-defined]
    watcher = threading.Thread(target=_watch, args=(watched, done), daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        first = record_failure(error)
        if first and not isinstance(error, JobError):
            raise PeerFailedError(first) from None
        raise
    finally:
        done.set()
        watcher.join(_JOIN_S)  # a thread that returns from C++ while the interpreter ends aborts the process


def _watch(store: dist.Store, done: threading.Event) -> None:
    while not done.wait(_WATCH_INTERVAL_S):
        first = first_failure(store)
        if first and not done.wait(_GRACE_S):
            print(f"rank {dist.get_rank()} is stuck because {first}", file=sys.stderr, flush=True)
            os._exit(1)


def _prefix(rank: int) -> str:
    return f"rank {rank} failed first:"


def _if_of_peer(first: str) -> str:
    return "" if first.startswith(_prefix(dist.get_rank())) else first


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
