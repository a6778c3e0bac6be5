"""A record of all that some processes do to the files of one folder.

[Note: Recording file operations]
The recorder looks at the folder just before every operation of Python on files, and whenever a file is synced. The
difference between two looks is what was done in between: new names, renames, removals, and new contents. So it also
sees the writes of C++ and Rust, which PyTorch and safetensors use; those libraries neither rename nor sync. Python's
audit hook announces every operation (`open`, `os.rename`, `shutil.rmtree` and so on), but not fsync, which is replaced
instead. Several ranks may be recorded: they announce their operations over a socket, one at a time.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Write:
    """A file got new contents."""

    file: int
    data: bytes
    """All of the file."""


@dataclass(frozen=True)
class Entries:
    """Names of folders changed, all at once, as in a rename."""

    changes: tuple[tuple[int, str, int | None], ...]
    """(folder, name, the file or folder that has the name; None if nothing has it any more)."""


@dataclass(frozen=True)
class Sync:
    """A file or a folder was synced (fsync)."""

    inode: int


@dataclass(frozen=True)
class Mark:
    """The program got to a point."""

    text: str


Operation = Write | Entries | Sync | Mark
ROOT = 0
"""The number of the recorded folder. Other folders and files are numbered as they appear."""


class Recorder:
    """The operations of all attached processes below `root`, in order, in `log`."""

    def __init__(self, root: Path, *, only: str | None = None) -> None:
        """Record the folder `root`, which exists; or only the folder `only` in it, and its name."""
        self.root, self._only = root, only
        self.log: list[Operation] = []
        self.folders = {ROOT}
        """The numbers of all folders."""
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {root.stat().st_ino: ROOT}
        self._names: dict[tuple[int, str], int] = {}
        self._data: dict[int, bytes] = {}
        self._next = 1
        self.announce()

    def announce(self, synced: int | None = None, mark: str | None = None) -> None:
        """Record what was done since the last call; then the sync of a file by its inode, or a mark."""
        with self._lock:
            self._look()
            if synced in self._numbers:
                self.log.append(Sync(self._numbers[synced]))
            if mark is not None:
                self.log.append(Mark(mark))

    def _look(self) -> None:
        names: dict[tuple[int, str], int] = {}
        numbers = {self.root.stat().st_ino: ROOT}
        data: dict[int, bytes] = {}
        pending = [(ROOT, self.root)]
        while pending:
            parent, folder = pending.pop()
            for entry in _listed(folder):
                if parent == ROOT and self._only not in (None, entry.name):
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                    number = self._numbers.get(info.st_ino, numbers.get(info.st_ino))
                    if number is None:
                        number, self._next = self._next, self._next + 1
                    if stat.S_ISDIR(info.st_mode):
                        self.folders.add(number)
                        pending.append((number, Path(entry.path)))
                    else:
                        data[number] = Path(entry.path).read_bytes()
                except FileNotFoundError:  # another process removed it just now; the next look sees that
                    continue
                numbers[info.st_ino] = number
                names[parent, entry.name] = number
        self._log_names(names)
        for number, content in data.items():
            if content != self._data.get(number, b""):
                self.log.append(Write(number, content))
        self._numbers, self._names, self._data = numbers, names, data

    def _log_names(self, names: dict[tuple[int, str], int]) -> None:
        gone = {number: place for place, number in self._names.items() if names.get(place) != number}
        for place, number in names.items():
            if self._names.get(place) == number:
                continue
            changes: list[tuple[int, str, int | None]] = [(*place, number)]
            if number in gone and (before := gone.pop(number)) not in names:
                changes.insert(0, (*before, None))
            self.log.append(Entries(tuple(changes)))
        for place in gone.values():
            if place not in names:
                self.log.append(Entries(((*place, None),)))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []


# -- attaching processes -----------------------------------------------------------------------------------------------

_CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_announce: Callable[..., Any] | None = None
_is_busy = threading.local()
_is_hooked = False
_fsync = os.fsync


@contextlib.contextmanager
def attached(announce: Callable[..., Any]) -> Iterator[None]:
    """Announce this process's operations: `announce()` before each, and `announce(synced=inode)` at each fsync."""
    global _announce, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_on_event)  # it cannot be removed
        _is_hooked = True
    _announce, os.fsync = announce, _recorded_fsync
    try:
        yield
        announce()
    finally:
        _announce, os.fsync = None, _fsync


def _call(**what: Any) -> None:
    if _announce is None or getattr(_is_busy, "now", False):
        return
    _is_busy.now = True  # the recorder opens files itself
    try:
        _announce(**what)
    finally:
        _is_busy.now = False


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if _announce is not None and (event in _CHANGES or (event == "open" and (args[2] or 0) & _WRITES)):
        _call()


def _recorded_fsync(file: Any) -> None:
    inode = os.fstat(file if isinstance(file, int) else file.fileno()).st_ino
    _call(synced=inode)
    _fsync(file)


@contextlib.contextmanager
def served(recorders: dict[str, Recorder]) -> Iterator[str]:
    """Let other processes attach to recorders by name, with `attached_to`. Yields the address."""
    with tempfile.TemporaryDirectory(prefix="laconic-recording-") as folder:
        listener = Listener(f"{folder}/socket", "AF_UNIX")
        threading.Thread(target=_accept, args=(listener, recorders), daemon=True).start()
        try:
            yield f"{folder}/socket"
        finally:
            listener.close()


def _accept(listener: Listener, recorders: dict[str, Recorder]) -> None:
    _is_busy.now = True
    with contextlib.suppress(OSError):  # the listener is closed at the end
        while True:
            threading.Thread(target=_serve, args=(listener.accept(), recorders), daemon=True).start()


def _serve(connection: Connection, recorders: dict[str, Recorder]) -> None:
    _is_busy.now = True
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, operation = connection.recv()
            recorders[name].announce(**operation)
            connection.send(None)


@contextlib.contextmanager
def attached_to(address: str, name: str) -> Iterator[Callable[..., None]]:
    """Announce this process's operations to the recorder `name` of another process. Yields the announcing function."""
    lock = threading.Lock()
    with Client(address) as connection:

        def announce(**what: Any) -> None:
            with lock:
                connection.send((name, what))
                connection.recv()

        with attached(announce):
            yield announce
