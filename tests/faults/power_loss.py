"""Every state of a folder that a loss of power may leave, from a record of all that was done to its files.

[Note: What a power cut may leave]
POSIX promises little, and file systems differ (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014). So
this model is weaker than any of them. At the instant of the cut,
  - a file's contents are durable up to its last fsync. Of what was written later, the disk has all, nothing, a part, or
    zeros in its place;
  - a new name, a rename or a removal is durable once the folder that lists the name was synced later. Of the others
    the disk has any subset, in any order of reaching it. A rename is atomic.
A sync of a file does not make its name durable, and the sync of a folder not the contents of its files.

A cut may come between any two recorded operations. Where an instant has few legal states, all are built. Where it has
more than `limit`, these are built: nothing or everything pending has reached the disk; all but one operation, or one
alone; the first ones, in their order; and random choices, with a fixed seed. Equal states are built once.

[Note: Recording file operations]
The recorder looks at the folder just before every operation of Python on files, and whenever a file is synced. The
difference between two looks is what was done in between: new names, renames, removals, and new contents. So it also
sees the writes of C++ and Rust, which PyTorch and safetensors use; those libraries neither rename nor sync. Python's
audit hook announces every operation (`open`, `os.rename`, `shutil.rmtree` and so on), but not fsync, which is replaced
instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class State:
    """The contents of a folder after a power cut."""

    files: dict[str, bytes]
    """All files by path."""
    folders: tuple[str, ...]
    """The paths of all folders, parents first."""
    marks: tuple[str, ...]
    """The points that the program had got to."""

    def write(self, folder: Path) -> None:
        """Make the state in an empty folder."""
        for name in self.folders:
            (folder / name).mkdir()
        for name, data in self.files.items():
            (folder / name).write_bytes(data)

    @property
    def digest(self) -> bytes:
        """A hash of everything."""
        hasher = hashlib.sha256(repr((self.folders, self.marks)).encode())
        for name, data in sorted(self.files.items()):
            hasher.update(repr((name, len(data))).encode() + data)
        return hasher.digest()


def crash_states(recorder: Recorder, *, limit: int, seed: int = 0) -> Iterator[State]:
    """Yield the states of [Note: What a power cut may leave], each once."""
    seen, choice = set(), random.Random(seed)
    for end, operation in enumerate(recorder.log, start=1):
        if isinstance(operation, Sync) and end < len(recorder.log):
            continue  # a sync only removes states: those after it are among those before the next operation
        instant = _Instant(recorder.log[:end], recorder.folders)
        for state in map(instant.state, _choices(instant.sizes, limit, choice)):
            if state.digest not in seen:
                seen.add(state.digest)
                yield state


def _choices(sizes: list[int], limit: int, choice: random.Random) -> Iterator[Sequence[int]]:
    """A way for each of `sizes`: all of them, or some."""
    if math.prod(sizes) <= limit:
        yield from itertools.product(*map(range, sizes))
        return
    nothing, everything = [0] * len(sizes), [size - 1 for size in sizes]
    yield from (nothing, everything)
    for place, size in enumerate(sizes):
        for number in range(size):
            for others in (nothing, everything):
                yield [*others[:place], number, *others[place + 1 :]]
        yield [*everything[:place], *nothing[place:]]
    for _ in range(limit // 2):
        yield [choice.randrange(size) for size in sizes]


def sampled_states(recorder: Recorder, count: int, *, seed: int = 0) -> Iterator[State]:
    """Yield about `count` states: nothing, everything and random parts of the pending operations at some instants."""
    choice, log = random.Random(seed), recorder.log
    for number in range(count):
        instant = _Instant(log[: 1 + number * len(log) // count], recorder.folders)
        how = [lambda size: 0, lambda size: size - 1, choice.randrange, choice.randrange][number % 4]
        yield instant.state([how(size) for size in instant.sizes])


def undisturbed(recorder: Recorder, text: str) -> list[State]:
    """The states without a power cut, at each mark `text`."""
    log = recorder.log
    ends = [index + 1 for index, operation in enumerate(log) if operation == Mark(text)]
    return [_Instant(log[:end], recorder.folders).last for end in ends]


class _Instant:
    """All that may be on the disk if power is lost after the last operation of `log`."""

    def __init__(self, log: Sequence[Operation], folders: set[int]) -> None:
        self._folders = folders
        synced = {operation.inode: index for index, operation in enumerate(log) if isinstance(operation, Sync)}
        self._names = [(index, op) for index, op in enumerate(log) if isinstance(op, Entries)]
        self._pending = [
            index
            for index, op in self._names
            if any(synced.get(folder, -1) < index for folder in {folder for folder, _, _ in op.changes})
        ]
        self._contents = _contents(log, synced)
        self._open = [file for file, variants in self._contents.items() if len(variants) > 1]
        self._marks = tuple(op.text for op in log if isinstance(op, Mark))
        self.sizes = [2] * len(self._pending) + [len(self._contents[file]) for file in self._open]
        """The number of ways in which each pending operation, and each file that is not synced, may be on the disk."""

    @property
    def last(self) -> State:
        """The state in which everything has reached the disk."""
        return self.state([size - 1 for size in self.sizes])

    def state(self, numbers: Sequence[int]) -> State:
        """The state with a way for each of `sizes`; the last way is that all has reached the disk."""
        lost = {index for index, number in zip(self._pending, numbers, strict=False) if not number}
        variant = dict(zip(self._open, numbers[len(self._pending) :], strict=True))
        tree: dict[int, dict[str, int]] = {}
        for index, operation in self._names:
            if index not in lost:
                for folder, name, inode in operation.changes:
                    if inode is None:
                        tree.get(folder, {}).pop(name, None)
                    else:
                        tree.setdefault(folder, {})[name] = inode
        files: dict[str, bytes] = {}
        made: list[str] = []

        def walk(folder: int, path: str) -> None:
            for name, inode in sorted(tree.get(folder, {}).items()):
                if inode in self._folders:
                    made.append(f"{path}{name}")
                    walk(inode, f"{path}{name}/")
                else:
                    variants = self._contents.get(inode, [b""])
                    files[f"{path}{name}"] = variants[variant.get(inode, len(variants) - 1)]

        walk(ROOT, "")
        return State(files, tuple(made), self._marks)


def _contents(log: Sequence[Operation], synced: dict[int, int]) -> dict[int, list[bytes]]:
    """The possible contents of each file on the disk: the durable ones, and parts and all of later ones."""
    durable: dict[int, bytes] = {}
    later: dict[int, list[bytes]] = {}
    for index, operation in enumerate(log):
        if isinstance(operation, Write):
            if synced.get(operation.file, -1) > index:
                durable[operation.file] = operation.data
            else:
                later.setdefault(operation.file, []).append(operation.data)
    found = {}
    for file in {*durable, *later}:
        before, versions = durable.get(file, b""), later.get(file, [])
        variants = [before]
        for data in versions:
            half = len(before) + (len(data) - len(before)) // 2 if data.startswith(before) else len(data) // 2
            variants += [data[:half], data[:half] + bytes(len(data) - half), data]
        found[file] = list(dict.fromkeys(variants))
        # The last version comes last, also if it equals an earlier one.
        last = versions[-1] if versions else before
        found[file] = [variant for variant in found[file] if variant != last] + [last]
    return found


# -- recording ---------------------------------------------------------------------------------------------------------


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
            try:
                entries = list(os.scandir(folder))
            except FileNotFoundError:  # another process removed it just now; the next look sees that
                continue
            for entry in entries:
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
                except FileNotFoundError:
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


# -- attaching processes ----------------------------------------------------------------------------------------------

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
