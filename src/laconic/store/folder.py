"""Durable folders: files that a manifest lists with their digests, committed by one rename.

[Note: A store]
A store is a set of files in a folder, and a manifest. The manifest is a JSON file with the size and the SHA-256 of each
file, with what else its writer tells, and with a checksum of itself. So a hash covers every byte. Every process writes
its own files and fsyncs them. Then one process writes the manifest and fsyncs it. The commit is one rename:
  - A folder of our own is written as NAME.tmp, and renamed to NAME. A folder called NAME was complete once.
  - In a folder that other programs write, or that has several stores, the manifest is renamed to its name.
A folder is removed in two moves. It becomes NAME.removed, and only when that name is durable, its files go. So a folder
called NAME that lacks its manifest or another file is damaged, and never half-written or half-removed.

Who reads trusts nothing: a file that differs from its record is damage, and a store with damage is not used.
Checkpoints (checkpoint/commit.py), states of islands (islands/state_folder.py), token files (data/arrays.py), the
folders of other trainers (integrations/trained_state.py) and published weights (publish/versions.py) are stores.
tests/store stops each of them at every `CrashPoint`, and cuts the power there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self

from laconic.store.files import remove, sync, write_text

REMAINS = r"(?:\.[0-9a-f]{32})?\.(?:tmp|removed\d*)"
"""A pattern of the endings that an interrupted write or removal leaves at a store's name. Nothing of it is a store."""
_MAX_THREADS = 8
_POLL_S = 0.1


class CrashPoint(StrEnum):
    """The instants of a write at which a kill leaves something else than before. A writer passes some or all."""

    BEGUN = "begun"
    """The folder to write into exists, and is empty."""
    WRITTEN = "written"
    """This process has written one more file."""
    SYNCED = "synced"
    """All files of this process are on the disk."""
    LISTED = "listed"
    """The manifest is on the disk: all is there, but under a temporary name."""
    SET_ASIDE = "set_aside"
    """An earlier store of this name has another name."""
    COMMITTED = "committed"
    """The store has its name."""
    NAMED = "named"
    """The file for people and scripts names the store."""
    REMOVED = "removed"
    """Older stores are called NAME.removed, and still have their files."""
    PRUNED = "pruned"
    """Older stores are removed."""


on_crash_point: Callable[[CrashPoint], None] | None = None
"""A hook for tests, called with each point when a writer gets there."""


def reached(point: CrashPoint) -> None:
    """Call the hook of the tests."""
    if on_crash_point is not None:
        on_crash_point(point)


class DamagedError(ValueError):
    """The bytes of a file are not those that were written, or of another format."""


# -- manifests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file in a manifest."""

    name: str
    """Its path in the folder."""
    size_bytes: int
    sha256: str | None
    """None in lists of early releases."""

    def __post_init__(self) -> None:
        """Raises: ValueError if the file is not in the folder."""
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names a file outside its folder, {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list of a store's files. Each kind of store is a subclass, which may add fields of plain values."""

    FORMAT: ClassVar[str]

    files: tuple[FileRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, and the format."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "files"}
        return {**own, "files": [asdict(record) for record in self.files], "format": self.FORMAT}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """Return the manifest of `to_json`. Raises: KeyError, TypeError, ValueError if `body` is not one."""
        body = {name: value for name, value in body.items() if name != "format"}
        return cls(**{**body, "files": tuple(FileRecord(**record) for record in body["files"])})

    @property
    def checksum(self) -> str:
        """A hash of all fields, and by them of all files."""
        return _checksum(self.to_json())

    def write(self, path: Path) -> None:
        """Create or replace a manifest file, which a power cut leaves whole or as it was."""
        body = self.to_json()
        write_text(path, json.dumps({**body, "checksum": _checksum(body)}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest file. Raises: OSError; DamagedError if it was altered, or has another format."""
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, called: str) -> Self:
        """Return the manifest that a file holds; `called` names the file in errors. Raises: see `read`."""
        try:
            body: dict[str, Any] = json.loads(data)
            checksum, wanted = body.pop("checksum"), _checksum(body)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DamagedError(f"{called} is unreadable: {error}") from error
        if checksum != wanted:
            raise DamagedError(f"{called} does not match its own checksum: it was altered after writing")
        if body.get("format") != cls.FORMAT:
            found = body.get("format")
            raise DamagedError(f"{called} has format {found!r}, this version of laconic reads {cls.FORMAT!r}")
        try:
            return cls.from_json(body)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{called} has other entries than a manifest: {error}") from error


def describe(folder: Path, name: str, *, chunk_bytes: int | None = None, sha256: str | None = None) -> FileRecord:
    """Return a file's record for the manifest. Cost: reads all of the file, unless its `sha256` is known."""
    path = folder / name
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=sha256 or file_digest(path, chunk_bytes))


def damage(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """Describe each file that differs from its record, or cannot be read; empty if there is none."""
    problems = []
    for record in records:
        try:
            problems.append(difference(folder, record))
        except OSError as error:
            problems.append(f"{record.name} is unreadable: {error.strerror or error}")
    return [problem for problem in problems if problem]


def difference(folder: Path, record: FileRecord, *, chunk_bytes: int | None = None) -> str:
    """Say how a file differs from its record; empty if it does not. Raises: OSError if it cannot be read."""
    path = folder / record.name
    if not path.exists():
        return f"{record.name} is missing"
    if (size_bytes := path.stat().st_size) != record.size_bytes:
        return f"{record.name} has {size_bytes} bytes instead of {record.size_bytes}"
    if record.sha256 and file_digest(path, chunk_bytes) != record.sha256:
        return f"{record.name} does not have the contents that were written"
    return ""


def not_seen(folder: Path, records: Iterable[FileRecord], patience_s: float) -> Path | None:
    """Wait for files that other machines have written, which a network file system may show late.

    Returns:
        A file that is not there after `patience_s` seconds; None if all are.
    """
    deadline_s = time.monotonic() + patience_s
    for record in records:
        while not (is_there := (folder / record.name).is_file()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if not is_there:
            return folder / record.name
    return None


def file_digest(path: Path, chunk_bytes: int | None = None) -> str:
    """The SHA-256 of a file; with `chunk_bytes` that of the SHA-256 of its chunks, which several threads hash."""
    with path.open("rb") as file:
        if chunk_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        starts = range(0, os.fstat(file.fileno()).st_size, chunk_bytes)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
            hashes = threads.map(partial(_digest_of_chunk, file.fileno(), chunk_bytes), starts)
            return hashlib.sha256(b"".join(hashes)).hexdigest()


def _digest_of_chunk(descriptor: int, size_bytes: int, start: int) -> bytes:
    return hashlib.sha256(os.pread(descriptor, size_bytes, start)).digest()


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# -- commits and removals: [Note: A store] -----------------------------------------------------------------------------


def begin(final: Path, *, writer: str = "") -> Path:
    """Make an empty folder, to be renamed to `final`, in a folder that exists.

    Where several programs may write at once, each has a name of its own, of 32 hexadecimal digits. Raises: OSError.
    """
    temporary = final.with_name(f"{final.name}{writer and f'.{writer}'}.tmp")
    remove(temporary)
    temporary.mkdir()
    return temporary


def commit(temporary: Path, final: Path, manifest: Manifest, name: str, *, aside: Path | None = None) -> None:
    """Rename a folder whose files are on the disk to `final`, once its manifest is there under `name`.

    What is called `final` already is renamed to `aside`, by default NAME.old.
    """
    manifest.write(temporary / name)
    sync(temporary)
    reached(CrashPoint.LISTED)
    if os.path.lexists(final):
        final.rename(aside or free_name(final, "old"))
        reached(CrashPoint.SET_ASIDE)
    temporary.rename(final)
    sync(final.parent)
    reached(CrashPoint.COMMITTED)


def commit_in_place(path: Path, manifest: Manifest) -> None:
    """Write the manifest `path`, once all files that it lists are on the disk."""
    manifest.write(path)
    sync(path.parent)
    reached(CrashPoint.COMMITTED)


def remove_folders(folders: Sequence[Path]) -> None:
    """Remove stores of one folder; at every instant each is whole, or has a name that says it is being removed."""
    removed = []
    for path in folders:
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            removed.append(path.rename(free_name(path, "removed")))
    if removed:
        sync(removed[0].parent)
        reached(CrashPoint.REMOVED)
    for path in removed:
        remove(path)


def free_name(path: Path, ending: str) -> Path:
    """Return `path` with `.ending`, and with a number if that name is taken."""
    names = (f"{path.name}.{ending}{number or ''}" for number in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))
