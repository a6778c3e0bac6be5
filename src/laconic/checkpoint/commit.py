"""The checkpoints of a run's folder: which is the newest, how one is committed, and which are removed. No tensors here.

[Note: Commit protocol]
A run's folder holds checkpoints `step-N`, a series of stores ([Note: A series] in store/series.py), and a file `latest`
that names the newest one for humans and scripts. Every rank writes its own files into `step-N.tmp`. Then rank 0
collects their names, sizes and hashes, and commits the folder.

Loading trusts nothing. Each rank hashes its share of the files. A checkpoint that does not match its manifest is
skipped with a warning, and the one committed before it is tried. "Before" means the manifest's `sequence`, not the
step: if a run goes back from step 10 to step 5 and saves step 7, step 7 is the newest. An earlier checkpoint of the
same step is moved to `step-N.old` before the new one takes its name. Loading still considers it, so at every instant
there is a checkpoint to load. Loading also warns if the checkpoint that `latest` names is gone, or has the manifest of
an earlier save. If there was a checkpoint and none is intact, loading fails; it does not start anew.

Pruning removes checkpoints with a readable manifest, and what an interrupted save or removal has left under the names
`.tmp`, `.old` and `.removed`. It keeps folders with a damaged manifest. If such a folder is in the way of a new
checkpoint of its step, it becomes `step-N.damaged`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from laconic.store import folder as store
from laconic.store.files import make_folder, remove, sync, write_text
from laconic.store.folder import CrashPoint, FileRecord, damage, reached
from laconic.store.series import MANIFEST, Member, Series

LATEST = "latest"
_NAMES = r"(step-\d+)(?:\.old\d*)?"
_OWN_FILES = (MANIFEST, ".metadata", "rank-00000.json")
"""Files by which a checkpoint is known, even if it has lost some of them."""
_SMALL_BYTES = 2**20
_T = TypeVar("_T")


class CheckpointError(ValueError):
    """A checkpoint could not be written, or none could be loaded, or it belongs to another model or run."""


class StorageError(CheckpointError):
    """The files of a folder could not be written or read. Raised on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(store.Manifest):
    """The contents of `manifest.json`."""

    FORMAT = "laconic-checkpoint-2"

    step: int
    sequence: int
    """1 for a folder's first checkpoint, then counting up. The highest is the one to resume from."""
    world_size: int
    versions: dict[str, str]


Candidate = Member[CheckpointManifest]
"""A folder that may be a complete checkpoint."""


def series(folder: Path) -> Series[CheckpointManifest]:
    """The checkpoints in a run's folder."""
    return Series(folder=folder, names=_NAMES, kind=CheckpointManifest, name_of=lambda made: f"step-{made.step}")


# -- writing -----------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """Make an empty `step-N.tmp` to write into. For rank 0. Raises OSError if `folder` is not writable."""
    make_folder(folder)
    return store.begin(folder / f"step-{step}")


def commit(folder: Path, temporary: Path, manifest: CheckpointManifest, *, keep: int, patience_s: float = 10) -> Path:
    """Make `temporary` the newest checkpoint, then remove all but `keep`. For rank 0, once all files are on disk.

    It waits up to `patience_s` seconds for other ranks' files, which a network file system may show late.

    Raises:
        CheckpointError: this rank does not see a file that another rank has written.
    """
    missing = store.not_seen(temporary, manifest.files, patience_s)
    if missing is not None:
        raise CheckpointError(
            f"rank 0 does not see {missing}, which another rank has written; "
            "the checkpoint folder must be on a file system that all nodes share"
        )
    final = folder / f"step-{manifest.step}"
    store.commit(temporary, final, manifest, MANIFEST, aside=_aside(final))
    write_text(folder / LATEST, final.name + "\n")
    sync(folder)
    reached(CrashPoint.NAMED)
    _prune(folder, keep=keep)
    reached(CrashPoint.PRUNED)
    return final


def _aside(final: Path) -> Path | None:
    """Return the name under which a damaged checkpoint of the same step is set aside, and warn that it is damaged."""
    if not os.path.lexists(final) or not (problem := series(final.parent).member(final, final.name).problem):
        return None
    kept = store.free_name(final, "damaged")
    warnings.warn(f"checkpoint {final} is damaged ({problem}); it is kept as {kept.name}", stacklevel=3)
    return kept


def _prune(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and the remains of interrupted saves and removals."""
    found = [candidate.folder.name for candidate in candidates(folder) if candidate.manifest]
    aside = [name for name in found if ".old" in name]
    old = {*[name for name in found if name not in aside][keep:], *aside}
    series(folder).prune(lambda name: name[0] in old)
    for path in folder.glob(f"{LATEST}.*.tmp"):
        remove(path)


# -- reading -----------------------------------------------------------------------------------------------------------


def candidates(folder: Path) -> list[Candidate]:
    """Return the checkpoints in a run's folder, newest first; or only `folder`, if it is a checkpoint itself.

    Damaged ones come first, so that a run that resumes warns of them. The checkpoint that `latest` names is among them
    if it is gone, or if a manifest of an earlier save is in the place of its own.

    Raises:
        CheckpointError: the folder is not readable.
    """
    try:
        if not folder.is_dir():
            return [Candidate(folder=folder, manifest=None, problem="is no folder")] if os.path.lexists(folder) else []
        if any(os.path.lexists(folder / name) for name in _OWN_FILES):
            return [series(folder.parent).member(folder)]
        found = series(folder).members()
    except OSError as error:
        raise CheckpointError(f"the checkpoint folder {folder} is not readable: {error}") from error
    intact = sorted((c for c in found if c.manifest), key=_sequence, reverse=True)
    damaged = [c for c in found if not c.manifest]
    contradiction = _contradiction(folder / LATEST, intact, damaged)
    return [*contradiction, *damaged, *[c for c in intact if c.folder not in {lost.folder for lost in contradiction}]]


def _contradiction(latest: Path, intact: Sequence[Candidate], damaged: Sequence[Candidate]) -> list[Candidate]:
    """Return what `latest` names, as a damaged candidate, if the candidates contradict it; nothing if they fit."""
    if not os.path.lexists(latest):
        return []
    try:
        name = latest.read_text().strip()
    except (OSError, ValueError) as error:
        return [Candidate(folder=latest, manifest=None, problem=f"is unreadable: {error}")]
    if not re.fullmatch(_NAMES, name):
        return [Candidate(folder=latest, manifest=None, problem=f"names no checkpoint, but {name[:80]!r}")]
    named = [c for c in (*intact, *damaged) if c.folder.name.partition(".")[0] == name]
    if not named:
        gone = f"is missing, but `{LATEST}` names it"
        return [Candidate(folder=latest.with_name(name), manifest=None, problem=gone)]
    # A kill just before `latest` moved leaves it at the checkpoint before the newest. That one has its own manifest.
    if (manifest := named[0].manifest) and named[0] is not intact[0]:
        problems = damage(named[0].folder, [file for file in manifest.files if file.size_bytes <= _SMALL_BYTES])
        if problems:
            return [Candidate(folder=named[0].folder, manifest=None, problem="; ".join(problems))]
    return []


def _sequence(candidate: Candidate) -> int:
    return candidate.manifest.sequence if candidate.manifest else 0


def next_sequence(folder: Path) -> int:
    """The sequence number of the next checkpoint."""
    return 1 + max(map(_sequence, candidates(folder)), default=0)


def use_newest(
    folder: Path,
    found: Sequence[Candidate],
    use: Callable[[Path, CheckpointManifest], _T],
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
