"""The folder of a machine that keeps the states of a run's last syncs.

[Note: The files of a state]
A run has a folder of its own, so a run never reads the files of another. A state has one file for each fragment, a
part, and an index file with the checksums of the parts. The index is written last, so a state without it does not
count. A fragment's part changes only at the fragment's own sync, and later states name the same file. All names begin
with what the file holds, so that any rank on the machine finds it, whatever its number in the job is. A file that is
damaged, or not what its name says, is reported and counts as missing.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from laconic.comm.entries import EntryError, typed
from laconic.islands import state_file
from laconic.islands.saved_state import SavedState
from laconic.islands.state_file import DamagedFileError
from laconic.store import files

_NAME = re.compile(
    r"start-(\d+)-step-\d+-island-(\d+)-shard-(\d+)-of-\d+(?:\.index|-fragment-\d+\.part)(?:\.[0-9a-f]+\.tmp)?"
)
_OTHERS = ("run-*", "island-state-*", "slice-*")
"""The names of other runs' states, and of those of earlier releases."""
CRASH_POINTS = (
    "begun",  # nothing of this state is written
    "removed",  # files that no state needs are gone
    "part_written",  # one more part is on disk; no index names it
    "parts_written",  # all parts are on disk
    "index_written",  # the state counts
)

on_crash_point: Callable[[str], None] | None = None
"""A hook for tests, called with each name of CRASH_POINTS when the writer gets there."""


def _reached(point: str) -> None:
    assert point in CRASH_POINTS, point
    if on_crash_point is not None:
        on_crash_point(point)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The states of a run on this machine."""

    states: tuple[SavedState, ...]
    problems: tuple[str, ...]
    """A line for each file that is not used, with its reason."""
    last_start: int
    """The highest number of a start in any name; 0 without one."""


@dataclass(kw_only=True)
class _Written:
    """A state that this rank has written: its index file, and the names of its parts."""

    steps: int
    index: str
    parts: tuple[str, ...]


@dataclass(kw_only=True)
class _Index:
    """The values of an index file."""

    run: str
    layout: str
    state: list[Any]
    """As `SavedState.to_json` returns it."""
    parts: list[tuple[str, str, int]]
    """The name, the checksum and the size of each part's file."""


@dataclass(kw_only=True)
class StateFolder:
    """The states of one run in a folder of this machine: [Note: The files of a state]. `folder` need not exist.

    `layout` stands for everything that must be equal in the run that restores: the names and shapes of the parameters,
    their fragments, the kind of optimizer.
    """

    folder: Path
    run: str
    layout: str
    _parts: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    """Name, checksum and size of the newest part of each fragment that this process has written."""
    _written: list[_Written] = field(default_factory=list)
    """The states of this process that are on disk, oldest first."""

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.folder / f"run-{quote(self.run, safe='')}"

    def create(self) -> None:
        """Create the folder and write a file into it. Raises: OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        probe = self.path / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, num_shards: int) -> Found:
        """Find the states of the run, of islands of `num_shards` ranks. Reads the index files only."""
        states: list[SavedState] = []
        problems = self._foreign()
        last_start = 0
        for path in self._list(self.path):
            named = _NAME.fullmatch(path.name)
            if named is None:
                continue
            last_start = max(last_start, int(named[1]))
            if path.suffix != ".index":
                continue
            try:
                state = self._read_index(path)[0]
                if state.num_shards != num_shards:
                    raise DamagedFileError(
                        f"it is of islands of {state.num_shards} ranks, and now they have {num_shards}"
                    )
                states.append(state)
            except (OSError, DamagedFileError) as error:
                problems.append(f"{_here(path)} is not used: {error}")
        return Found(states=tuple(states), problems=tuple(problems), last_start=last_start)

    def newest_slices(self) -> tuple[int, ...] | None:
        """Return the slices that this machine trained at its last sync; None if it has kept no sync."""
        found: list[SavedState] = []
        for path in self._list(self.path, "*.index"):
            try:
                found.append(self._read_index(path, any_layout=True)[0])
            except (OSError, DamagedFileError):
                continue  # `find` reports it
        return max(found, key=lambda state: (state.sync, -state.island, -state.shard)).slices if found else None

    def read(self, state: SavedState) -> bytearray:
        """Return the bytes of a state's files, one after the other, as `parse` takes them.

        Raises:
            DamagedFileError: a file is missing, or is not the one that the index names.
        """
        index = self.path / f"{state.name}.index"
        try:
            _, parts = self._read_index(index)
            read = [index.read_bytes(), *((self.path / name).read_bytes() for name, _, _ in parts)]
        except OSError as error:
            raise DamagedFileError(
                f"{_here(Path(error.filename or index))} cannot be read: {error.strerror}"
            ) from error
        except DamagedFileError as error:
            raise DamagedFileError(f"{_here(index)} is not used: {error}") from error
        for (name, digest, nbytes), data in zip(parts, read[1:], strict=True):
            if len(data) != nbytes or data[: len(digest)] != digest.encode():
                raise DamagedFileError(f"{_here(self.path / name)} is not the file that {index.name} names")
        if tuple(map(len, read)) != state.sizes:
            raise DamagedFileError(f"{_here(index)} has changed since it was found")
        return bytearray().join(read)

    def parse(self, data: bytearray, state: SavedState) -> list[Any]:
        """Return the values of each fragment, from the bytes of `read` on this machine or another one.

        Raises:
            DamagedFileError: a byte is not as it was written, or it is another state.
        """
        whole, begin, pieces = memoryview(data), 0, []
        for size in state.sizes:
            pieces.append(whole[begin : begin + size])
            begin += size
        index = _index_of(pieces[0])
        if self._state_of(index, len(pieces[0])) != state:
            raise DamagedFileError("it is another state than was announced")
        return [state_file.parse(piece, digest) for piece, (_, digest, _) in zip(pieces[1:], index.parts, strict=True)]

    def _foreign(self) -> list[str]:
        """Name the states of other runs, and files of other programs or releases."""
        found = (path for pattern in _OTHERS for path in self._list(self.folder, pattern))
        others = sorted(path.name for path in found if path != self.path)
        if not others:
            return []
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return [
            f"{_here(self.folder)} has states of other runs, which are not used: {', '.join(others[:3])}{more}; remove "
            "those that are over"
        ]

    def _list(self, folder: Path, pattern: str = "*") -> list[Path]:
        try:
            return sorted(folder.glob(pattern))
        except OSError:
            return []

    def _read_index(self, path: Path, *, any_layout: bool = False) -> tuple[SavedState, list[tuple[str, str, int]]]:
        """Read an index file: the state, and the name, checksum and size of each part."""
        data = path.read_bytes()
        index = _index_of(data)
        state = self._state_of(index, len(data))
        if path.name != f"{state.name}.index":
            raise DamagedFileError(f"it holds {state.name}, and not what its name says")
        if not any_layout and index.layout != self.layout:
            raise DamagedFileError("it is of another model, optimizer or division into fragments")
        return state, index.parts

    def _state_of(self, index: "_Index", nbytes: int) -> SavedState:
        """Return the state that an index file of `nbytes` bytes describes."""
        if index.run != self.run:
            raise DamagedFileError(f"it is of the run {index.run!r}, and this is {self.run!r}")
        try:
            state = SavedState.from_json(index.state)
        except EntryError as error:
            raise DamagedFileError(f"it is no index file ({error})") from error
        return replace(state, sizes=(nbytes, *(size for _, _, size in index.parts)))

    # -- writing -------------------------------------------------------------------------------------------------------

    def missing(self, synced: int, num_fragments: int) -> list[int]:
        """Return the fragments whose parts the next state needs: the synced one, and those that are not on disk."""
        self._parts.pop(synced, None)
        return [index for index in range(num_fragments) if index not in self._parts]

    def forget(self) -> None:
        """Forget what is on disk, because every fragment has changed."""
        self._parts.clear()
        self._written.clear()

    def write(self, state: SavedState, parts: dict[int, Any], keep_from: int) -> None:
        """Write a state: the `parts` that `missing` has named, then the index. A kill leaves the state or none.

        Before that, remove this rank's states that are older than step `keep_from`, and the states of earlier starts;
        with 0 none.

        Raises:
            OSError: a file cannot be written. Earlier states stay.
        """
        _reached("begun")
        if keep_from:
            self._remove(state, keep_from)
            _reached("removed")
        for index, values in parts.items():
            name = f"{state.name}-fragment-{index}.part"
            self._parts[index] = (name, *state_file.write(self.path / name, values))
            _reached("part_written")
        files.sync(self.path)
        _reached("parts_written")
        named = [self._parts[index] for index in sorted(self._parts)]
        index_file = f"{state.name}.index"
        contents = _Index(run=self.run, layout=self.layout, state=state.to_json(), parts=named)
        state_file.write(self.path / index_file, vars(contents))
        files.sync(self.path)
        _reached("index_written")
        self._written.append(
            _Written(steps=state.sync.steps, index=index_file, parts=tuple(name for name, _, _ in named))
        )

    def _remove(self, newest: SavedState, keep_from: int) -> None:
        """Remove this rank's states before step `keep_from`, and all files of earlier starts."""
        self._written = [state for state in self._written if state.steps >= keep_from]
        kept = {name for state in self._written for name in (state.index, *state.parts)}
        stale = []
        for path in self._list(self.path):
            named = _NAME.fullmatch(path.name)
            if named is None:
                continue
            start, island, shard = map(int, named.groups())
            is_own = (start, island, shard) == (newest.sync.start, newest.island, newest.shard)
            if start < newest.sync.start or (is_own and path.name not in kept):
                stale.append(path)
        _unlink(path for path in stale if path.suffix == ".index")  # first, so that no index names a missing part
        _unlink(path for path in stale if path.suffix != ".index")


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _here(path: Path) -> str:
    return f"{socket.gethostname()}:{path}"


def _index_of(data: bytes | memoryview) -> _Index:
    """Read the bytes of an index file. Raises: DamagedFileError."""
    try:
        return typed(_Index, state_file.parse(data))
    except EntryError as error:
        raise DamagedFileError(f"it is no index file ({error})") from error
