"""The first failure of a job, shown by every rank.

[Note: Failing together]
An error that nobody foresaw ends one rank in the middle of a step. The other ranks then hang in a collective or die of
a closed connection, and whoever prints last buries the cause. So the first rank to fail leaves its traceback in the
rendezvous store. The other ranks find it there, on their own error or by a watcher thread that looks every few seconds;
they show it instead of their own traceback and exit. `lab/worker.py` does the same for any script, so it uses a file
and imports nothing of laconic.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from laconic.errors import JobError

_KEY = "laconic/first-failure"
_WATCH_INTERVAL_S = 3.0
_GRACE_S = 10.0
_JOIN_S = 5.0


class PeerFailedError(RuntimeError):
    """Another rank failed first; the message is its traceback."""


def record_failure(error: BaseException, store: dist.Store | None = None) -> str:
    """Leave the traceback of `error` as the job's first failure; return the first failure of another rank, or "".

    Without a reachable store (its host has failed) the result is "".
    """
    own = f"{_begin(dist.get_rank())}\n{''.join(traceback.format_exception(error))}"
    try:
        first = (store or _default_store()).compare_set(_KEY, "", own).decode()
    except Exception:  # the store died with its host, which is then what failed
        return ""
    return _of_others(first)


def first_failure(store: dist.Store | None = None) -> str:
    """The first failure that another rank has recorded, or ""."""
    store = store or _default_store()
    try:
        return _of_others(store.get(_KEY).decode()) if store.check([_KEY]) else ""
    except Exception:  # as above
        return ""


@contextlib.contextmanager
def failing_together(world_size: int) -> Iterator[None]:
    """Show the first failing rank's traceback on every rank, and end ranks that hang because of it.

    Raises: PeerFailedError in place of this rank's error, if another rank failed first. A JobError stays as it is.
    """
    if world_size == 1:
        yield
        return
    done = threading.Event()
    # a clone has its own connection: the watcher never waits behind a blocking call of the main thread
    own = _default_store().clone()  # type: ignore[attr-defined]
    watcher = threading.Thread(target=_watch, args=(own, done), daemon=True)
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
        watcher.join(_JOIN_S)  # a thread that leaves C++ while the interpreter ends aborts the process


def _watch(store: dist.Store, done: threading.Event) -> None:
    while not done.wait(_WATCH_INTERVAL_S):
        first = first_failure(store)
        if first and not done.wait(_GRACE_S):
            print(f"rank {dist.get_rank()} is stuck because {first}", file=sys.stderr, flush=True)
            os._exit(1)


def _begin(rank: int) -> str:
    """How the record of a rank begins."""
    return f"rank {rank} failed first:"


def _of_others(first: str) -> str:
    return "" if first.startswith(_begin(dist.get_rank())) else first


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
