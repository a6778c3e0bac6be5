"""The lock on an output folder: one run at a time writes there.

[Note: One run per output folder]
Two runs in one folder would mix their metrics and delete each other's checkpoints. So rank 0 holds `flock` on the file
`.lock` of the folder while it runs. The kernel frees a `flock` when the process ends, however it ends: a killed run
leaves no stale lock, and no time-out has to tell a dead run from a slow one. A pid file would need both. `lockf` would
not do: it is lost when the process closes any other descriptor of the file. On NFS, Linux passes a `flock` on to the
server, which frees the locks of a machine that died once their lease ends. A file system without locks (Lustre without
`-o flock`, some FUSE) gets one line instead of a lock. A process that is being killed frees its memory before its
files, so a new run waits a few seconds for the lock. The file stays: to delete a locked file is a race. It says who
holds the lock.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from laconic.config import JobError

LOCK = ".lock"
"""The name of the file in the output folder."""
_PATIENCE_S = 5.0  # for a process that is being killed


@contextlib.contextmanager
def as_output(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block, which begins to use the output folder, into a JobError."""
    try:
        yield
    except OSError as error:
        raise JobError(f"train.output = {str(folder)!r} cannot be written: {error}; choose another folder") from error


@contextlib.contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Create an output folder, and hold its lock in the block: [Note: One run per output folder].

    Raises:
        JobError: another run holds it, or the folder cannot be written.
    """
    with as_output(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    _held.append(descriptor)  # a forked child would hold the lock after this process has died
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _is_taken(descriptor, folder):
            if time.monotonic() > deadline:
                raise JobError(
                    f"train.output = {str(folder)!r} is in use by {_owner(descriptor)}; wait for its end, end it, or "
                    "choose another folder"
                )
            time.sleep(0.1)
        owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        with as_output(folder):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{owner}\n".encode(), 0)
        yield
    finally:
        if descriptor in _held:  # not in a forked child
            _held.remove(descriptor)
            os.close(descriptor)


def _is_taken(descriptor: int, folder: Path) -> bool:
    """Try to take the lock. A file system without locks gives it to everybody."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(
            f"train.output = {str(folder)!r} cannot be locked ({error}): make sure that no other run writes there",
            file=sys.stderr,
            flush=True,
        )
    return True


def _owner(descriptor: int) -> str:
    """The run that holds the lock, as it has written into the file."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"another run (host {owner['host']}, pid {owner['pid']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"


_held: list[int] = []
"""The descriptors of the locks that this process holds."""


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
