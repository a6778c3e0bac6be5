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
import weakref
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


class OutputLock:
    """The lock of one output folder, until `release` or the end of the process: [Note: One run per output folder]."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, and take the lock.

        Raises:
            JobError: another run holds it, or the folder cannot be written.
        """
        with as_output(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take(folder)
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self)  # a forked child would hold the lock after this process has died

    def release(self) -> None:
        """Free the lock."""
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        _held.discard(self)
        os.close(self._descriptor)

    def __enter__(self) -> "OutputLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _take(self, folder: Path) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_taken(folder):
            if time.monotonic() > deadline:
                raise JobError(
                    f"train.output = {str(folder)!r} is in use by {self._owner()}; wait for its end, end it, or choose "
                    "another folder"
                )
            time.sleep(0.1)
        owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        with as_output(folder):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{owner}\n".encode(), 0)

    def _is_taken(self, folder: Path) -> bool:
        """Try to take the lock. A file system without locks gives it to everybody."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            print(
                f"train.output = {str(folder)!r} cannot be locked ({error}): make sure that no other run writes there",
                file=sys.stderr,
                flush=True,
            )
        return True

    def _owner(self) -> str:
        """The run that holds the lock, as it has written into the file."""
        try:
            owner = json.loads(os.pread(self._descriptor, 4096, 0))
            return f"another run (host {owner['host']}, pid {owner['pid']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another run"


_held: weakref.WeakSet[OutputLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)
