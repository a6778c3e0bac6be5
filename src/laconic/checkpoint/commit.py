"""How a checkpoint folder comes into being, is trusted, and goes: the commit protocol, without tensors.

[Note: Commit protocol]
A run's folder holds checkpoints `step-N` and a file `latest` that names one of them for humans and scripts. A
checkpoint is written in `step-N.tmp`: every rank writes and fsyncs its own files, then rank 0 collects their names,
sizes and hashes (a few bytes per rank; no state ever crosses the wire), writes `manifest.json`, fsyncs it and the
folder, and renames the folder. The rename is the commit: a folder without `.tmp` and with a manifest was once complete.
The manifest carries a checksum of itself, so that every byte of a checkpoint is covered.

Loading trusts nothing: each rank hashes its share of the files, and a checkpoint that does not match its manifest is
skipped with a warning in favour of the one committed before it. "Before" is the manifest's `sequence`, not the step:
whoever goes back to step 5 of a run that had reached step 10 and saves step 7 wants 7 next time. A checkpoint of the
same step is moved to `step-N.old` before the new one takes its name, and counts as a candidate, so at no instant is
there none. `CRASH_POINTS` names the instants between these actions; the tests kill a rank at each.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.files import sync_folder, write_text

FORMAT = "laconic-checkpoint-2"
MANIFEST = "manifest.json"
LATEST = "latest"
CRASH_POINTS = (
    "begun",  # step-N.tmp exists, empty
    "shards_written",  # this rank's tensors are on disk
    "sidecar_written",  # and its sidecar
    "manifest_written",  # complete, but still called step-N.tmp
    "old_set_aside",  # an earlier checkpoint of this step is step-N.old
    "renamed",  # committed
    "latest_moved",
    "pruned",
)
_NAME = re.compile(r"^step-(\d+)(\.old)?$")

on_crash_point: Callable[[str], None] | None = None
"""A test's hook, called with each name of CRASH_POINTS as it is passed."""


class CheckpointError(ValueError):
    """A checkpoint could not be written, or none could be loaded, or it belongs to something else."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What the manifest says about one file."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`."""

    step: int
    sequence: int
    """1 for a folder's first checkpoint, then counting up; the highest is the one to resume from."""
    world_size: int
    versions: dict[str, str]
    files: tuple[FileRecord, ...]
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        body = asdict(self)
        write_text(folder / MANIFEST, json.dumps({**body, "checksum": _checksum(body)}, indent=1))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises: CheckpointError if the manifest is unreadable, altered, or of another format."""
        try:
            body: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
            checksum = body.pop("checksum")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is unreadable: {error}") from error
        if checksum != _checksum(body):
            raise CheckpointError(
                f"{folder / MANIFEST} does not match its own checksum: it was altered after it was written"
            )
        if body["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {body['format']!r}, this version of laconic reads {FORMAT!r}")
        return Manifest(**{**body, "files": tuple(FileRecord(**record) for record in body["files"])})


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A folder that may be a complete checkpoint."""

    folder: Path
    manifest: Manifest | None
    problem: str = ""
    """Why there is no manifest to go by."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def reached(point: str) -> None:
    assert point in CRASH_POINTS, point
    if on_crash_point is not None:
        on_crash_point(point)


def candidates(folder: Path) -> list[Candidate]:
    """Checkpoints of a run's folder, the one to resume from first; or the single one that `folder` itself is."""
    if (folder / MANIFEST).exists():
        return [_candidate(folder)]
    if not folder.is_dir():
        return []
    found = [_candidate(path) for path in folder.iterdir() if _NAME.match(path.name) and (path / MANIFEST).exists()]
    # Damaged manifests go first, so that whoever resumes is told about them.
    return sorted(found, key=lambda c: (c.manifest is None, c.manifest.sequence if c.manifest else 0), reverse=True)


def describe_file(path: Path, name: str) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=digest)


def damage(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """What is wrong with the files that `records` describe; empty if nothing is. Cheap checks first."""
    problems = []
    for record in records:
        path = folder / record.name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != record.size_bytes:
                problems.append(f"{record.name} has {size_bytes} bytes instead of {record.size_bytes}")
            elif describe_file(path, record.name).sha256 != record.sha256:
                problems.append(f"{record.name} does not have the contents that were written")
        except OSError as error:
            problems.append(f"{record.name} is unreadable: {error.strerror or error}")
    return problems


def begin(folder: Path, step: int) -> Path:
    """Rank 0: an empty `step-N.tmp` to write into."""
    temporary = folder / f"step-{step}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def commit(folder: Path, temporary: Path, manifest: Manifest, *, keep: int, patience_s: float = 10) -> Path:
    """Rank 0, after every rank's files are on disk: make `temporary` the newest checkpoint, then remove the oldest."""
    deadline_s = time.monotonic() + patience_s
    for record in manifest.files:
        # A network file system may show another node's files a little late.
        while not (seen := (temporary / record.name).is_file()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        if not seen:
            raise CheckpointError(
                f"rank 0 does not see {temporary / record.name}, which another rank has written; "
                "the checkpoint folder must be on a file system that all nodes share"
            )
    manifest.write(temporary)
    sync_folder(temporary)
    reached("manifest_written")
    final, old = step_folder(folder, manifest.step), folder / f"step-{manifest.step}.old"
    if final.exists():
        if (final / MANIFEST).exists():
            if old.exists():
                shutil.rmtree(old)
            final.rename(old)
        else:  # the rest of an interrupted removal
            shutil.rmtree(final)
        reached("old_set_aside")
    temporary.rename(final)
    sync_folder(folder)
    reached("renamed")
    write_text(folder / LATEST, final.name + "\n")
    sync_folder(folder)
    reached("latest_moved")
    _prune(folder, keep=keep)
    reached("pruned")
    return final


def next_sequence(folder: Path) -> int:
    return 1 + max((c.manifest.sequence for c in candidates(folder) if c.manifest), default=0)


def _candidate(folder: Path) -> Candidate:
    try:
        return Candidate(folder=folder, manifest=Manifest.read(folder))
    except (CheckpointError, KeyError, TypeError) as error:
        return Candidate(folder=folder, manifest=None, problem=str(error))


def _prune(folder: Path, *, keep: int) -> None:
    complete = [c.folder for c in candidates(folder) if c.manifest and not c.folder.name.endswith(".old")]
    leftovers = [path for path in folder.glob("step-*") if path.name.endswith((".tmp", ".old"))]
    headless = [p for p in folder.glob("step-*") if _NAME.match(p.name) and not (p / MANIFEST).exists()]
    for path in {*complete[keep:], *leftovers, *headless}:
        # Without its manifest a half-removed folder is no candidate and causes no false alarm.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
