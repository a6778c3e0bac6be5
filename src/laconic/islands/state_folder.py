"""The folder of a machine that keeps the states of a run's last syncs.

[Note: The files of a state]
A run has a folder of its own, so a run never reads the files of another. A state is a store in it ([Note: A store] in
store/folder.py), with a file for each fragment, a part. A fragment's part changes only at the fragment's own sync, and
later states have the same file under one more name (a hard link). The folder's name says what it holds, so that any
rank on the machine finds it, whatever its number in the job is. A state that is damaged, or not what its name says, is
reported and counts as missing.
"""

import hashlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from laconic.comm.entries import EntryError
from laconic.islands import earlier_states
from laconic.islands.saved_state import SavedState
from laconic.store import folder as store
from laconic.store import tensors
from laconic.store.files import link_or_copy, make_folder, remove
from laconic.store.folder import CrashPoint, DamagedError, FileRecord, reached

MANIFEST = "manifest.json"
_NAME = re.compile(
    r"(?P<state>start-(\d+)-step-\d+-island-(\d+)-shard-(\d+)-of-\d+)"
    rf"(?P<rest>{store.REMAINS}|(?:\.index|-fragment-\d+\.part)(?:\.[0-9a-f]+\.tmp)?|)"
)
"""A state, or what an interrupted write or removal has left of it, or a file of an earlier release."""
_OTHERS = ("run-*", "island-state-*", "slice-*")
"""The names of other runs' states, and of those of the earliest releases."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The states of a run on this machine."""

    states: tuple[SavedState, ...]
    problems: tuple[str, ...]
    """A line for each state that is not used, with its reason."""
    last_start: int
    """The highest number of a start in any name; 0 without one."""


@dataclass(frozen=True, kw_only=True)
class StateFiles(store.Manifest):
    """The manifest of a state. Its files are the parts, by fragment."""

    FORMAT = "laconic-state-2"

    run: str
    layout: str | None
    state: list[Any]
    """As `SavedState.to_json` returns it."""


@dataclass(kw_only=True)
class StateFolder:
    """The states of one run in a folder of this machine: [Note: The files of a state]. `folder` need not exist.

    `layout` stands for everything that must be equal in the run that restores: the names and shapes of the parameters,
    their fragments, the kind of optimizer. None finds states of every layout, and writes none.
    """

    folder: Path
    run: str
    layout: str | None
    _parts: dict[int, FileRecord] = field(default_factory=dict)
    """The part of each fragment in the newest state of this process, unless the fragment has changed since."""
    _written: dict[str, int] = field(default_factory=dict)
    """The states of this process that are on disk, oldest first: their steps by name."""

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.folder / f"run-{quote(self.run, safe='')}"

    @property
    def _newest(self) -> Path:
        """The newest state of this process that is on disk."""
        return self.path / [*self._written][-1]

    def create(self) -> None:
        """Create the folder and write a file into it. Raises: OSError."""
        make_folder(self.path)
        probe = self.path / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, num_shards: int | None = None) -> Found:
        """Find the states of the run, of islands of `num_shards` ranks or any. Reads the manifests only."""
        states: list[SavedState] = []
        problems = self._foreign()
        for path in self._manifests():
            try:
                state = self._read_state(path)
                if num_shards not in (None, state.num_shards):
                    raise DamagedError(f"it is of islands of {state.num_shards} ranks, and now they have {num_shards}")
                states.append(state)
            except (OSError, DamagedError) as error:
                problems.append(f"{_here(path)} is not used: {error}")
        starts = [int(named[2]) for _, named in self._named()]
        return Found(states=tuple(states), problems=tuple(problems), last_start=max(starts, default=0))

    def read(self, state: SavedState) -> bytearray:
        """Return the bytes of a state's files, one after the other, as `parse` takes them.

        Raises:
            DamagedError: a file is missing, or has another size than the state says.
        """
        path = next((path for path in self._manifests() if _name_of(path) == state.name), self.path / state.name)
        try:
            data = path.read_bytes()
            files = _manifest_of(data)[0].files
            read = [data, *((path.parent / record.name).read_bytes() for record in files)]
        except (OSError, DamagedError) as error:
            raise DamagedError(f"{_here(path)} is not used: {error}") from error
        if tuple(map(len, read)) != state.sizes:
            raise DamagedError(f"{_here(path)}, or a file that it lists, is not as it was found")
        return bytearray().join(read)

    def parse(self, data: bytearray, state: SavedState) -> list[Any]:
        """Return the values of each fragment, from the bytes of `read` on this machine or another one.

        Raises:
            DamagedError: a byte is not as it was written, or it is another state.
        """
        whole, begin, pieces = memoryview(data), 0, []
        for size in state.sizes:
            pieces.append(whole[begin : begin + size])
            begin += size
        manifest, is_earlier = _manifest_of(bytes(pieces[0]))
        if self._state_of(manifest, len(pieces[0])) != state:
            raise DamagedError("it is another state than was announced")
        parts = zip(manifest.files, pieces[1:], strict=True)
        if is_earlier:
            return [earlier_states.parse(piece, record.sha256) for record, piece in parts]
        return [_values_of(record, piece) for record, piece in parts]

    def _foreign(self) -> list[str]:
        """Name the states of other runs, and files of other programs or releases."""
        found = (path for pattern in _OTHERS for path in _list(self.folder, pattern))
        others = sorted(path.name for path in found if path != self.path)
        if not others:
            return []
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return [
            f"{_here(self.folder)} has states of other runs, which are not used: {', '.join(others[:3])}{more}; remove "
            "those that are over"
        ]

    def _named(self) -> Iterator[tuple[Path, re.Match[str]]]:
        """The files and folders of states, with their names' parts."""
        for path in _list(self.path):
            if named := _NAME.fullmatch(path.name):
                yield path, named

    def _manifests(self) -> list[Path]:
        """The manifest of each state, or the index of an earlier release's state, whether it is there or not."""
        own = {"": MANIFEST, ".index": ""}
        return [path / own[named["rest"]] for path, named in self._named() if named["rest"] in own]

    def _read_state(self, path: Path) -> SavedState:
        """Read a manifest, and return the state that it describes."""
        data = path.read_bytes()
        manifest = _manifest_of(data)[0]
        state = self._state_of(manifest, len(data))
        if _name_of(path) != state.name:
            raise DamagedError(f"it holds {state.name}, and not what its name says")
        if self.layout not in (None, manifest.layout):
            raise DamagedError("it is of another model, optimizer or division into fragments")
        return state

    def _state_of(self, manifest: StateFiles, nbytes: int) -> SavedState:
        """Return the state that a manifest of `nbytes` bytes describes."""
        if manifest.run != self.run:
            raise DamagedError(f"it is of the run {manifest.run!r}, and this is {self.run!r}")
        try:
            state = SavedState.from_json(manifest.state)
        except EntryError as error:
            raise DamagedError(f"it is no manifest of a state ({error})") from error
        return replace(state, sizes=(nbytes, *(record.size_bytes for record in manifest.files)))

    # -- writing -------------------------------------------------------------------------------------------------------

    def missing(self, synced: int, num_fragments: int) -> list[int]:
        """Return the fragments whose parts the next state needs: the synced one, and those that are not on disk."""
        self._parts.pop(synced, None)
        on_disk = {index for index, record in self._parts.items() if (self._newest / record.name).is_file()}
        return [index for index in range(num_fragments) if index not in on_disk]

    def forget(self) -> None:
        """Forget what is on disk, because every fragment has changed."""
        self._parts.clear()
        self._written.clear()

    def write(self, state: SavedState, parts: dict[int, Any], keep_from: int) -> None:
        """Write a state, with the `parts` that `missing` has named. A kill leaves the state or none.

        Before that, remove this rank's states that are older than step `keep_from`, and the states of earlier starts;
        with 0 none.

        Raises:
            OSError: a file cannot be written. Earlier states stay.
        """
        temporary = store.begin(self.path / state.name)
        reached(CrashPoint.BEGUN)
        try:
            if keep_from:
                self._remove(state, keep_from)
                reached(CrashPoint.PRUNED)
            self._write(temporary, state, parts)
        except OSError:
            remove(temporary)
            raise

    def _write(self, temporary: Path, state: SavedState, parts: dict[int, Any]) -> None:
        records = {index: record for index, record in self._parts.items() if index not in parts}
        for record in records.values():
            link_or_copy(self._newest / record.name, temporary / record.name)
        for index, values in parts.items():
            records[index] = tensors.write(temporary / f"fragment-{index}.safetensors", values)
            reached(CrashPoint.WRITTEN)
        reached(CrashPoint.SYNCED)
        files = tuple(records[index] for index in sorted(records))
        manifest = StateFiles(files=files, run=self.run, layout=self.layout, state=state.to_json())
        store.commit(temporary, self.path / state.name, manifest, MANIFEST)
        self._parts, self._written[state.name] = records, state.sync.steps

    def _remove(self, newest: SavedState, keep_from: int) -> None:
        """Remove this rank's states before step `keep_from`, and all of earlier starts."""
        self._written = {name: steps for name, steps in self._written.items() if steps >= keep_from}
        stale = []
        for path, named in self._named():
            start, island, shard = (int(named[number]) for number in (2, 3, 4))
            is_own = (start, island, shard) == (newest.sync.start, newest.island, newest.shard)
            is_needed = named["state"] in (newest.name, *self._written)
            if start < newest.sync.start or (is_own and not is_needed):
                stale.append((path, named["rest"]))
        store.remove_folders([path for path, rest in stale if not rest])
        for path, _ in sorted(stale, key=lambda each: each[1] != ".index"):  # or an index would name a missing part
            remove(path)


def _name_of(manifest: Path) -> str:
    return manifest.stem if manifest.suffix == ".index" else manifest.parent.name


def _values_of(record: FileRecord, data: memoryview) -> Any:
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise DamagedError(f"{record.name} does not have the contents that were written")
    return tensors.parse(data)


def _manifest_of(data: bytes) -> tuple[StateFiles, bool]:
    """Return the manifest of a state, and whether it is of an earlier release. Raises: DamagedError."""
    if data.startswith(b"{"):
        return StateFiles.parse(data, "it"), False
    values = earlier_states.parse(data)
    try:
        parts = [FileRecord(name=name, size_bytes=size, sha256=digest) for name, digest, size in values.pop("parts")]
        return StateFiles(**{**values, "files": tuple(parts)}), True
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"it is no index of a state ({error})") from error


def _list(folder: Path, pattern: str = "*") -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _here(path: Path) -> str:
    return f"{socket.gethostname()}:{path}"
