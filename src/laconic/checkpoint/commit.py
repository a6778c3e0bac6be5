"""The commit protocol: how a checkpoint folder is written, checked and removed. No tensors here.

[Note: Commit protocol]
A run's folder holds checkpoints `step-N`, and a file `latest` that names the newest one for humans and scripts. A
checkpoint is written in `step-N.tmp`. Every rank writes and fsyncs its own files. Then rank 0 collects their names,
sizes and hashes. It writes `manifest.json`, fsyncs it and the folder, and renames the folder. The rename is the commit:
a folder named `step-N` was complete once. The manifest contains a checksum of itself, so a hash covers every byte of a
checkpoint. A folder is removed in two moves: it becomes `step-N.removed`, and only when that name is durable, its
files go. So a folder `step-N` without its manifest, or without any other file, is damaged, and never half-removed.

Loading trusts nothing. Each rank hashes its share of the files. A checkpoint that does not match its manifest is
skipped with a warning, and the one committed before it is tried. "Before" means the manifest's `sequence`, not the
step: if a run goes back from step 10 to step 5 and saves step 7, step 7 is the newest. An earlier checkpoint of the
same step is moved to `step-N.old` before the new one takes its name. Loading still considers it, so at every instant
there is a checkpoint to load. Loading also warns if the checkpoint that `latest` names is gone, or has the manifest of
an earlier save. If there was a checkpoint and none is intact, loading fails; it does not start anew.

Pruning removes checkpoints with a readable manifest, and what an interrupted save or removal has left under the names
`.tmp`, `.old` and `.removed`. It keeps folders with a damaged manifest. If such a folder is in the way of a new
checkpoint of its step, it becomes `step-N.damaged`.

The tests kill a rank at each of `CRASH_POINTS`, the instants between these actions. tests/faults loads every state that
a power cut may leave.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from laconic.store.files import make_folder, remove, sync, write_text

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
_NAME = re.compile(r"^step-(\d+)(\.old\d*)?$")
_REMAINS = re.compile(rf"^(step-\d+(\.old\d*)?\.(tmp|removed\d*)|{LATEST}\.\w+\.tmp)$")
"""The names of what an interrupted save or removal may leave; nothing of it is a checkpoint."""
_OWN_FILES = (MANIFEST, ".metadata", "rank-00000.json")
"""Files by which a checkpoint is known, even if it has lost some of them."""
_SMALL_BYTES = 2**20
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
        path = folder / MANIFEST
        try:
            body: dict[str, Any] = json.loads(path.read_text())
            checksum = body.pop("checksum")
        except FileNotFoundError as error:
            raise CheckpointError(f"its {MANIFEST} is missing") from error
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is unreadable: {error}") from error
        if checksum != _checksum(body):
            raise CheckpointError(f"{path} does not match its own checksum: it was altered after writing")
        if body.get("format") != FORMAT:
            found = body.get("format")
            raise CheckpointError(f"{folder} has format {found!r}, this version of laconic reads {FORMAT!r}")
        try:
            manifest = Manifest.of(body)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} has other entries than a manifest: {error}") from error
        if any(Path(record.name).name != record.name for record in manifest.files):
            raise CheckpointError(f"{path} names a file outside its folder")
        return manifest

    @staticmethod
    def of(body: dict[str, Any]) -> Manifest:
        """Make a manifest from its fields, as `asdict` gives them or JSON."""
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
    make_folder(folder)
    temporary = folder / f"step-{step}.tmp"
    remove(temporary)
    temporary.mkdir()
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
    final = folder / f"step-{manifest.step}"
    if os.path.lexists(final):
        _set_aside(final, manifest.step)
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


def _set_aside(final: Path, step: int) -> None:
    """Move an earlier checkpoint of a step out of the way, to `step-N.old`; to `step-N.damaged` if it is damaged."""
    if not (problem := _candidate(final, step).problem):
        final.rename(_free_name(final, "old"))
        return
    kept = final.rename(_free_name(final, "damaged"))
    warnings.warn(f"checkpoint {final} is damaged ({problem}); it is kept as {kept.name}", stacklevel=3)


def _prune(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and the remains of interrupted saves and removals."""
    found = [candidate.folder for candidate in candidates(folder) if candidate.manifest]
    aside = [path for path in found if ".old" in path.name]
    _remove([*[path for path in found if path not in aside][keep:], *aside])
    for path in folder.iterdir():
        if _REMAINS.match(path.name):
            remove(path)


def _remove(checkpoints: Sequence[Path]) -> None:
    """Remove checkpoints of one folder; at every instant each is whole, or has a name that says it is being removed."""
    removed = []
    for path in checkpoints:
        removed.append(_free_name(path, "removed"))
        path.rename(removed[-1])
    if removed:
        sync(removed[0].parent)
    for path in removed:
        remove(path)


def _free_name(path: Path, ending: str) -> Path:
    """Return `path` with `.ending`, and with a number if that name is taken."""
    names = (f"{path.name}.{ending}{number or ''}" for number in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointCandidate:
    """A folder that may be a complete checkpoint."""

    folder: Path
    manifest: Manifest | None
    problem: str = ""
    """Why there is no readable manifest."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        body = (
            None if self.manifest is None else {**asdict(self.manifest), "files": [*map(asdict, self.manifest.files)]}
        )
        return {"folder": str(self.folder), "manifest": body, "problem": self.problem}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> CheckpointCandidate:
        """Return the candidate of `to_json`."""
        manifest = None if fields["manifest"] is None else Manifest.of(fields["manifest"])
        return CheckpointCandidate(folder=Path(fields["folder"]), manifest=manifest, problem=fields["problem"])


def candidates(folder: Path) -> list[CheckpointCandidate]:
    """Return the checkpoints in a run's folder, newest first; or only `folder`, if it is a checkpoint itself.

    Damaged ones come first, so that a run that resumes warns of them. The checkpoint that `latest` names is among them
    if it is gone, or if a manifest of an earlier save is in the place of its own.

    Raises:
        CheckpointError: the folder is not readable.
    """
    try:
        if not folder.is_dir():
            return (
                [CheckpointCandidate(folder=folder, manifest=None, problem="is no folder")]
                if os.path.lexists(folder)
                else []
            )
        if any(os.path.lexists(folder / name) for name in _OWN_FILES):
            return [_candidate(folder)]
        found = [_candidate(path, int(name[1])) for path in folder.iterdir() if (name := _NAME.match(path.name))]
    except OSError as error:
        raise CheckpointError(f"the checkpoint folder {folder} is not readable: {error}") from error
    intact = sorted((c for c in found if c.manifest), key=_sequence, reverse=True)
    damaged = sorted((c for c in found if not c.manifest), key=lambda c: c.folder.name)
    contradiction = _contradiction(folder / LATEST, intact, damaged)
    return [*contradiction, *damaged, *[c for c in intact if c.folder not in {lost.folder for lost in contradiction}]]


def _contradiction(
    latest: Path, intact: Sequence[CheckpointCandidate], damaged: Sequence[CheckpointCandidate]
) -> list[CheckpointCandidate]:
    """Return what `latest` names, as a damaged candidate, if the candidates contradict it; nothing if they fit."""
    if not os.path.lexists(latest):
        return []
    try:
        name = latest.read_text().strip()
    except (OSError, ValueError) as error:
        return [CheckpointCandidate(folder=latest, manifest=None, problem=f"is unreadable: {error}")]
    if not _NAME.match(name):
        return [CheckpointCandidate(folder=latest, manifest=None, problem=f"names no checkpoint, but {name[:80]!r}")]
    named = [c for c in (*intact, *damaged) if c.folder.name.partition(".")[0] == name]
    if not named:
        return [
            CheckpointCandidate(
                folder=latest.with_name(name), manifest=None, problem=f"is missing, but `{LATEST}` names it"
            )
        ]
    # A kill just before `latest` moved leaves it at the checkpoint before the newest. That one has its own manifest.
    if (manifest := named[0].manifest) and named[0] is not intact[0]:
        problems = damage(named[0].folder, [file for file in manifest.files if file.size_bytes <= _SMALL_BYTES])
        if problems:
            return [CheckpointCandidate(folder=named[0].folder, manifest=None, problem="; ".join(problems))]
    return []


def _sequence(candidate: CheckpointCandidate) -> int:
    return candidate.manifest.sequence if candidate.manifest else 0


def next_sequence(folder: Path) -> int:
    """The sequence number of the next checkpoint."""
    return 1 + max(map(_sequence, candidates(folder)), default=0)


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
    found: Sequence[CheckpointCandidate],
    use: Callable[[Path, Manifest], _T],
    *,
    find_damage: Callable[[Path, Sequence[FileRecord]], list[str]] = damage,
    warns: bool = True,
    stacklevel: int = 3,
) -> _T | None:
    """Call `use` with the folder and the manifest of the newest intact checkpoint in `found`, and return its result.

    A checkpoint is damaged if `find_damage` finds damage or `use` raises StorageError. It is skipped, with a warning if
    `warns`; `stacklevel` leads from here to the caller of the public function. Returns None if `found` is empty. Raises
    CheckpointError if all candidates are damaged.
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
            warnings.warn(f"checkpoint {candidate.folder} is damaged and is skipped: {problem}", stacklevel=stacklevel)
    if complaints:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is intact ({'; '.join(complaints)}); "
            "restore one from a backup, or start anew in another folder"
        )
    return None


def _candidate(folder: Path, step: int | None = None) -> CheckpointCandidate:
    """Read a folder's manifest; `step` is the step that the folder's name has."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return CheckpointCandidate(folder=folder, manifest=None, problem=str(error))
    if step not in (None, manifest.step):
        return CheckpointCandidate(
            folder=folder, manifest=None, problem=f"its {MANIFEST} is that of step {manifest.step}"
        )
    return CheckpointCandidate(folder=folder, manifest=manifest)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
