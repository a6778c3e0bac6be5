"""The folder of a machine that keeps the states of a run's last syncs.

[Note: The files of a state]
A run has a folder of its own, so a run never reads the files of another. It is a series of stores ([Note: A series] in
store/series.py). A state has a file for each fragment, a part. A fragment's part changes only at the fragment's own
sync, and later states have the same file under one more name (a hard link). The folder's name says what it holds, so
that any rank on the machine finds it, whatever its number in the job is. A state that is damaged, or not what its name
says, is reported and counts as missing.
"""

import contextlib
import hashlib
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from laconic.islands.saved_state import SavedState
from laconic.store import folder as store
from laconic.store import tensors
from laconic.store.files import link_or_copy, make_folder, remove
from laconic.store.folder import CrashPoint, DamagedError, FileRecord, reached
from laconic.store.series import MANIFEST, Series, numbered

_NAMES = r"(start-(\d+)-step-\d+-island-(\d+)-shard-(\d+)-of-\d+)"
_OTHERS = r"run-.*|island-state-.*|slice-.*"
"""The names of other runs' states, and of those of early releases; later ones had index files in a run's folder."""


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
    def _series(self) -> Series[SavedState]:
        return Series(folder=self.path, names=_NAMES, kind=SavedState, name_of=lambda state: state.name)

    @property
    def _newest(self) -> Path:
        """The newest state of this process that is on disk."""
        return self.path / [*self._written][-1]

    @property
    def newest_steps(self) -> int:
        """The step of the newest state that this process has written; 0 before the first."""
        return max(self._written.values(), default=0)

    def create(self) -> None:
        """Create the folder and write a file into it. Raises: OSError."""
        make_folder(self.path)
        probe = self.path / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, num_shards: int | None = None) -> tuple[list[SavedState], list[str]]:
        """Find the states of the run, of islands of `num_shards` ranks or any. Reads the manifests only.

        Returns also a line for each state that is not used, with its reason.
        """
        states, problems = list[SavedState](), list[str]()
        with contextlib.suppress(OSError):  # what cannot be read is not there
            problems += self._foreign()
            for member in self._series.members():
                state, problem = member.manifest, member.problem
                if state is not None and not (problem := self._misfit(state, num_shards)):
                    states.append(state)
                else:
                    problems.append(f"{_here(member.folder)} is not used: {problem}")
        return states, problems

    def last_start(self) -> int:
        """The highest number of a start in any name, of remains too; 0 without one."""
        with contextlib.suppress(OSError):
            return max((int(name[2]) for _, name in numbered(self.path, _NAMES + ".*")), default=0)
        return 0

    def _foreign(self) -> list[str]:
        """Name the states of other runs, and files of other programs or releases."""
        found = [*numbered(self.folder, _OTHERS), *numbered(self.path, rf"{_NAMES}\.index")]
        others = [path.name for path, _ in found if path != self.path]
        if not others:
            return []
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return [
            f"{_here(self.folder)} has states of other runs, which are not used: {', '.join(others[:3])}{more}; remove "
            "those that are over"
        ]

    def _misfit(self, state: SavedState, num_shards: int | None) -> str:
        """Say why this run cannot restore a state; empty if it can."""
        if state.run != self.run:
            return f"it is of the run {state.run!r}, and this is {self.run!r}"
        if self.layout not in (None, state.layout):
            return "it is of another model, optimizer or division into fragments"
        if num_shards not in (None, state.num_shards):
            return f"it is of islands of {state.num_shards} ranks, and now they have {num_shards}"
        return ""

    def read(self, state: SavedState) -> bytearray:
        """Return the bytes of a state's files, one after the other, as `parse` takes them.

        Raises:
            DamagedError: a file is missing, or has another size than the state says.
        """
        folder = self.path / state.name
        try:
            read = [(folder / record.name).read_bytes() for record in state.files]
        except OSError as error:
            raise DamagedError(f"{_here(folder)} is not used: {error}") from error
        if [*map(len, read)] != state.sizes:
            raise DamagedError(f"{_here(folder)}, or a file that it lists, is not as it was found")
        return bytearray().join(read)

    @staticmethod
    def parse(data: bytearray, state: SavedState) -> list[Any]:
        """Return the values of each fragment, from the bytes of `read` on this machine or another one.

        Raises:
            DamagedError: a byte is not as it was written.
        """
        whole, begin, values = memoryview(data), 0, []
        for record in state.files:
            part = whole[begin : begin + record.size_bytes]
            if hashlib.sha256(part).hexdigest() != record.sha256:
                raise DamagedError(f"{record.name} does not have the contents that were written")
            values.append(tensors.parse(part))
            begin += record.size_bytes
        return values

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
            records = {index: record for index, record in self._parts.items() if index not in parts}
            for record in records.values():
                link_or_copy(self._newest / record.name, temporary / record.name)
            for index, values in parts.items():
                records[index] = tensors.write(temporary / f"fragment-{index}.safetensors", values)
                reached(CrashPoint.WRITTEN)
            reached(CrashPoint.SYNCED)
            files = tuple(records[index] for index in sorted(records))
            manifest = replace(state, run=self.run, layout=self.layout, files=files)
            store.commit(temporary, self.path / state.name, manifest, MANIFEST)
        except OSError:
            remove(temporary)
            raise
        self._parts, self._written[state.name] = records, state.sync.steps

    def _remove(self, newest: SavedState, keep_from: int) -> None:
        """Remove this rank's states before step `keep_from`, and all of earlier starts."""
        self._written = {name: steps for name, steps in self._written.items() if steps >= keep_from}

        def is_old(name: re.Match[str]) -> bool:
            start, island, shard = (int(name[number]) for number in (2, 3, 4))
            is_own = (start, island, shard) == (newest.sync.start, newest.island, newest.shard)
            is_needed = name[1] in (newest.name, *self._written)
            return start < newest.sync.start or (is_own and not is_needed)

        self._series.prune(is_old, is_old)


def _here(path: Path) -> str:
    return f"{socket.gethostname()}:{path}"
