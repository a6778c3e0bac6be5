"""A folder of versions, looked at and put in order by hand: verified, watched, squashed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from laconic.hf.folder import INDEX
from laconic.publish.encodings import EncodedPart, encode_dense
from laconic.publish.reader import Reader
from laconic.publish.source import FolderSource, VersionSource
from laconic.publish.staging import StagedTensor, check_files, stage_version
from laconic.publish.versions import (
    MANIFEST,
    PublishedPart,
    PublishedTensor,
    PublishError,
    VersionManifest,
    version_name,
)
from laconic.publish.writing import write_parts
from laconic.store import folder as store
from laconic.store.files import make_folder, remove, write_text
from laconic.store.folder import CrashPoint, reached

_MAX_FILE_BYTES = 1 << 30


class VersionVerdict(NamedTuple):
    """The finding of `verify` about one version."""

    version: int
    problem: str
    """Empty if every byte is right."""
    has_values: bool
    """Whether values were compared with their digests, too; not for a patch of a version that is not there."""


def verify(source: VersionSource) -> Iterator[VersionVerdict]:
    """Read all versions, oldest first; compare all files with their records, and all values with their digests.

    Cost: host memory for the model twice, and for one file.
    """
    values: dict[str, Tensor] = {}
    held: VersionManifest | None = None
    for version in source.versions():
        try:
            manifest = source.manifest(version)
            known = values if held is not None and _follows(manifest, held) else {}
            values = {}
            for kind in manifest.kinds:
                if kind == "patch" and not known:
                    check_files(source, manifest, kind)
                    continue
                staged = {each.name: StagedTensor(each, None, None) for each in manifest.tensors}
                for name, before in known.items() if kind == "patch" else ():
                    staged[name].begin_whole(before)
                stage_version(source, manifest, kind, staged)
                values = _checked(staged)
            held = manifest if values else None
            yield VersionVerdict(version, "", bool(values))
        except (PublishError, OSError) as error:
            values, held = {}, None
            yield VersionVerdict(version, str(error), False)


def _follows(manifest: VersionManifest, held: VersionManifest) -> bool:
    """Whether a version is a patch of another. Raises: PublishError if it says so and is not."""
    if manifest.base != held.version:
        return False
    if {each.name: each.before for each in manifest.tensors} != held.digests or manifest.run != held.run:
        raise PublishError(f"version {manifest.version} is no patch of version {held.version}, which it names")
    return True


def _checked(staged: dict[str, StagedTensor]) -> dict[str, Tensor]:
    """All values of a version, whose digests are right. Raises: PublishError if they are not."""
    values = {}
    for name, each in staged.items():
        each.check(each.published.after)
        assert each.full is not None
        values[name] = each.full
    return values


class VersionSummary(NamedTuple):
    """One version as `watch` shows it."""

    version: int
    step: int | None
    patch_bytes: int | None
    """None without a patch."""
    whole_bytes: int | None
    """None without whole values."""
    problem: str


def summaries(source: VersionSource) -> Iterator[VersionSummary]:
    """Describe all versions by their manifests, oldest first."""
    for version in source.versions():
        try:
            manifest = source.manifest(version)
        except (PublishError, OSError) as error:
            yield VersionSummary(version, None, None, None, str(error))
            continue
        sizes = {kind: manifest.nbytes(kind) for kind in manifest.kinds}
        yield VersionSummary(version, manifest.step, sizes.get("patch"), sizes.get("whole"), "")


def squash(source: VersionSource, to: str | Path) -> Path:
    """Write the newest version into another folder, as whole values alone, with its number and its run.

    Every tensor has its own name and shape in its file, and an index such as folders of the hub have says in which. So
    engines load the weights from there. A `Reader` of the new folder goes on from any version of it. The source stays
    as it is. Returns the folder of the version.

    Cost: host memory for the model, and for one file.

    Raises:
        PublishError: the source has no version, or a damaged one; or the folder has the version already.
        OSError: the folder cannot be written.
    """
    reader = Reader(source)
    values = {patch.name: patch.values for patch in reader.patches()}
    assert reader.version is not None
    newest, final = source.manifest(reader.version), Path(to) / version_name(reader.version)
    if final.exists():
        raise PublishError(f"{final} exists already; give another folder")
    make_folder(final.parent)
    temporary = store.begin(final)
    reached(CrashPoint.BEGUN)
    try:
        shapes = {each.name: each.shape for each in newest.tensors}
        parts = (_whole(each, values[each.name]) for each in newest.tensors if each.numel)
        files, written = write_parts(temporary, "whole", 0, parts, shapes, max_file_bytes=_MAX_FILE_BYTES)
        weight_map = {name: part.file for name, part in written}
        write_text(temporary / INDEX, json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        files.append(store.describe(temporary, INDEX))
        reached(CrashPoint.SYNCED)
        by_name = {name: (part,) for name, part in written}
        manifest = VersionManifest(
            files=tuple(files),
            run=newest.run,
            version=newest.version,
            base=None,
            is_whole=True,
            step=newest.step,
            names=newest.names,
            tensors=tuple(_alone(each, by_name.get(each.name, ())) for each in newest.tensors),
        )
        store.commit(temporary, final, manifest, MANIFEST)
    except OSError:
        remove(temporary)
        raise
    return final


def _whole(tensor: PublishedTensor, values: Tensor) -> tuple[str, EncodedPart]:
    return tensor.name, encode_dense((0,), (tensor.numel,), values.contiguous())


def _alone(tensor: PublishedTensor, whole: tuple[PublishedPart, ...]) -> PublishedTensor:
    return PublishedTensor(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        before=None,
        after=tensor.after,
        patch=(),
        whole=whole,
    )


def lags(source: FolderSource) -> dict[str, int | None]:
    """How many versions each registered reader is behind the newest; None for one that has no version."""
    versions = source.versions()
    return {
        name: None if each.version is None else sum(version > each.version for version in versions)
        for name, each in source.registrations().items()
    }
