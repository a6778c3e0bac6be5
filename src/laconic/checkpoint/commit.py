"""The commit protocol: how a checkpoint folder is written, checked and removed. No tensors here.

[Note: Commit protocol]
A run's folder holds checkpoints `step-N`, and a file `latest` that names the newest one for humans and scripts. A
checkpoint is written in `step-N.tmp`. Every rank writes and fsyncs its own files. Then rank 0 collects their names,
sizes and hashes. It writes `manifest.json`, fsyncs it and the folder, and renames the folder. The rename is the commit:
a folder that has a manifest, and a name without `.tmp`, was complete once. The manifest contains a checksum of itself,
so a hash covers every byte of a checkpoint.

Loading trusts nothing. Each rank hashes its share of the files. A checkpoint that does not match its manifest is
skipped with a warning, and the one committed before it is tried. "Before" means the manifest's `sequence`, not the
step: if a run goes back from step 10 to step 5 and saves step 7, step 7 is the newest. An earlier checkpoint of the
same step is moved to `step-N.old` before the new one takes its name. Loading still considers it, so at every instant
there is a checkpoint to load. The tests kill a rank at each of `CRASH_POINTS`, the instants between these actions.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from laconic.files import sync, write_text

FORMAT = "laconic-checkpoint-2"
MANIFEST = "manifest.json"
LATEST = "latest"
CRASH_POINTS = (
    "begun",  # step-N.tmp exists and is empty
    "shards_written",  # this rank's tensors are on disk
    "sidecar_written",  # this rank's sidecar is on disk
    "manifest_written",  # complete, but still called step-N.tmp
    "old_set_aside",  # an earlier checkpoint of this step is step-N.old
    "renamed",  # step-N is committed
    "latest_moved",  # `latest` names step-N
    "pruned",  # older checkpoints are removed
)
_POLL_S = 0.1
_NAME = re.compile(r"^step-(\d+)(\.old)?$")
_T = TypeVar("_T")

on_crash_point: Callable[[str], None] | None = None
"""A hook for tests, called with each name of CRASH_POINTS when the writer gets there."""


class CheckpointError(ValueError):
    """A checkpoint could not be written, or none could be loaded, or it belongs to another model or run."""


class StorageError(CheckpointError):
    """The files of a folder could not be written or read. Raised on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file in the manifest."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`."""

    step: int
    sequence: int
    """1 for a folder's first checkpoint, then counting up. The highest is the one to resume from."""
    world_size: int
    versions: dict[str, str]
    files: tuple[FileRecord, ...]
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, durably."""
        body = asdict(self)
        write_text(folder / MANIFEST, json.dumps({**body, "checksum": _checksum(body)}, indent=1))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a folder. Raises CheckpointError if it is unreadable, altered, or of another format."""
        try:
            body: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
            checksum = body.pop("checksum")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is unreadable: {error}") from error
        if checksum != _checksum(body):
            raise CheckpointError(f"{folder / MANIFEST} does not match its own checksum: it was altered after writing")
        if body["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {body['format']!r}, this version of laconic reads {FORMAT!r}")
        return Manifest(**{**body, "files": tuple(FileRecord(**record) for record in body["files"])})


# -- writing -----------------------------------------------------------------------------------------------------------


def reached(point: str) -> None:
    """Call the hook of the tests with the name of a crash point."""
    assert point in CRASH_POINTS, point
    if on_crash_point is not None:
        on_crash_point(point)


def describe_file(folder: Path, name: str) -> FileRecord:
    """Return a file's record for the manifest. Cost: reads all of the file."""
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(name=name, size_bytes=(folder / name).stat().st_size, sha256=digest)


def begin(folder: Path, step: int) -> Path:
    """Make an empty `step-N.tmp` to write into. For rank 0. Raises OSError if `folder` is not writable."""
    temporary = folder / f"step-{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(folder: Path, temporary: Path, manifest: Manifest, *, keep: int, patience_s: float = 10) -> Path:
    """Make `temporary` the newest checkpoint, then remove all but `keep`. For rank 0, once all files are on disk.

    It waits up to `patience_s` seconds for other ranks' files, which a network file system may show late.

    Raises:
        CheckpointError: this rank does not see a file that another rank has written.
    """
    deadline_s = time.monotonic() + patience_s
    for record in manifest.files:
        while not (is_there := (temporary / record.name).is_file()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if not is_there:
            raise CheckpointError(
                f"rank 0 does not see {temporary / record.name}, which another rank has written; "
                "the checkpoint folder must be on a file system that all nodes share"
            )
    manifest.write(temporary)
    sync(temporary)
    reached("manifest_written")
    final, old = folder / f"step-{manifest.step}", folder / f"step-{manifest.step}.old"
    if final.exists():
        if (final / MANIFEST).exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        else:  # the rest of an interrupted removal
            shutil.rmtree(final)
        reached("old_set_aside")
    temporary.rename(final)
    sync(folder)
    reached("renamed")
    write_text(folder / LATEST, final.name + "\n")
    sync(folder)
    reached("latest_moved")
    _prune(folder, keep=keep)
    reached("pruned")
    return final


def _prune(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and the remains of interrupted saves and removals."""
    complete = [c.folder for c in candidates(folder) if c.manifest and not c.folder.name.endswith(".old")]
    leftovers = [path for path in folder.glob("step-*") if path.name.endswith((".tmp", ".old"))]
    headless = [p for p in folder.glob("step-*") if _NAME.match(p.name) and not (p / MANIFEST).exists()]
    for path in {*complete[keep:], *leftovers, *headless}:
        # The manifest goes first: without it a half-removed folder is no candidate and causes no false alarm.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A folder that may be a complete checkpoint."""

    folder: Path
    manifest: Manifest | None
    problem: str = ""
    """Why there is no readable manifest."""


def candidates(folder: Path) -> list[Candidate]:
    """Return the checkpoints in a run's folder, newest first; or only `folder`, if it is a checkpoint itself."""
    if (folder / MANIFEST).exists():
        return [_candidate(folder)]
    if not folder.is_dir():
        return []
    found = [_candidate(path) for path in folder.iterdir() if _NAME.match(path.name) and (path / MANIFEST).exists()]
    # Damaged manifests come first, so that a run that resumes warns of them.
    return sorted(found, key=lambda c: (c.manifest is None, c.manifest.sequence if c.manifest else 0), reverse=True)


def next_sequence(folder: Path) -> int:
    """The sequence number of the next checkpoint."""
    return 1 + max((c.manifest.sequence for c in candidates(folder) if c.manifest), default=0)


def damage(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """Describe each file that differs from its record; empty if none does. Sizes are compared before hashes."""
    problems = []
    for record in records:
        try:
            size_bytes = (folder / record.name).stat().st_size
            if size_bytes != record.size_bytes:
                problems.append(f"{record.name} has {size_bytes} bytes instead of {record.size_bytes}")
            elif describe_file(folder, record.name) != record:
                problems.append(f"{record.name} does not have the contents that were written")
        except OSError as error:
            problems.append(f"{record.name} is unreadable: {error.strerror or error}")
    return problems


def use_newest(
    folder: Path,
    found: Sequence[Candidate],
    use: Callable[[Path, Manifest], _T],
    *,
    find_damage: Callable[[Path, Sequence[FileRecord]], list[str]] = damage,
    warns: bool = True,
) -> _T | None:
    """Call `use` with the folder and the manifest of the newest intact checkpoint in `found`, and return its result.

    A checkpoint is damaged if `find_damage` finds damage or `use` raises StorageError. It is skipped, with a warning if
    `warns`. Returns None if `found` is empty. Raises CheckpointError if all candidates are damaged.
    """
    complaints: list[str] = []
    for candidate in found:
        manifest, problem = candidate.manifest, candidate.problem
        if manifest is not None and not (problem := "; ".join(find_damage(candidate.folder, manifest.files))):
            try:
                return use(candidate.folder, manifest)
            except StorageError as error:
                problem = str(error)
        complaints.append(f"{candidate.folder}: {problem}")
        if warns:
            warnings.warn(f"checkpoint {candidate.folder} is damaged and is skipped: {problem}", stacklevel=3)
    if complaints:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is intact ({'; '.join(complaints)}); "
            "restore one from a backup, or start anew in another folder"
        )
    return None


def _candidate(folder: Path) -> Candidate:
    try:
        return Candidate(folder=folder, manifest=Manifest.read(folder))
    except (CheckpointError, KeyError, TypeError) as error:
        return Candidate(folder=folder, manifest=None, problem=str(error))


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
