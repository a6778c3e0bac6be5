"""The tensors of versions that are being read: what will change, before anything does; and whether all of it is right.

[Note: Nothing half]
A reader applies a version when it has all of it, and has found every digest right. Until then new values wait in host
memory beside the tensors. Changes with gaps wait as places and values, so a patch takes its own size. Dense and
lossless parts wait in a copy of their tensor. The digest of what a tensor will be follows from that of what it is:
[Note: Digests of published tensors] in changes.py. Patches of several versions are staged one after the other, and
applied at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.errors import listing
from laconic.publish.changes import (
    added,
    as_text,
    decode_dense,
    decode_gaps,
    decode_lossless,
    digest_at,
    flat_places,
    put,
    region_of,
    run_digest,
    taken,
)
from laconic.publish.versions import (
    Encoding,
    Kind,
    PublishedPart,
    PublishedTensor,
    PublishError,
    VersionManifest,
    VersionSource,
    remedy,
)
from laconic.store.folder import DamagedError, FileRecord
from laconic.store.tensors import parse_named


class StagedTensor:
    """The new values of one tensor: [Note: Nothing half]."""

    def __init__(self, published: PublishedTensor, own: Tensor | None, digest: str | None) -> None:
        """Stage for `own`, a tensor of the published shape and dtype whose digest is `digest`.

        None stands for a tensor that is elsewhere, or has other values: then whole values come first, or only gaps.
        """
        self.published, self._own, self._digest = published, own, digest
        self.full: Tensor | None = None
        """All new values, on the host, if they are known as such."""
        self._places: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, part: PublishedPart, data: Mapping[str, Tensor]) -> None:
        """Take in a part, whose tensors are in `data`.

        Raises:
            DamagedError: the tensors are no such part.
            PublishError: it is coded by values that are elsewhere.
        """
        published, dtype, place = self.published, self.published.torch_dtype, (part.start, part.sizes)
        if part.encoding is Encoding.LOSSLESS:
            target = region_of(self._copied(), place)
            target.copy_(decode_lossless(part, data, target))
        elif part.encoding is Encoding.GAPS:
            self._change(*decode_gaps(part, data, published.numel, dtype))
        else:
            values = decode_dense(part, data, dtype)
            if self.full is None and part.numel == published.numel:
                self.begin_whole()
            if self.full is None and self._own is None:
                places = flat_places(place, published.shape, torch.arange(part.numel))
                self._change(places, values.reshape(-1))
            else:
                region_of(self._copied(), place).copy_(values)

    def _change(self, places: Tensor, values: Tensor) -> None:
        """Stage elements at places of the flattened tensor."""
        if self.full is not None:
            put(self.full, places, values)
        else:
            self._places.append(places)
            self._values.append(values)

    def begin_whole(self, values: Tensor | None = None) -> None:
        """Forget what is staged: whole values follow, or are `values`, contiguous on the host, which will change."""
        self._places, self._values = [], []
        if values is None:
            try:
                values = torch.empty(self.published.shape, dtype=self.published.torch_dtype)
            except (RuntimeError, MemoryError) as error:  # more than there is, or than a number of 64 bits counts
                raise PublishError(
                    f"{self.published.name}, {self.published.dtype}{list(self.published.shape)}, does not fit into "
                    "host memory; read it on a larger machine"
                ) from error
        self.full = values

    @property
    def changes(self) -> tuple[Tensor, Tensor]:
        """The places that change, (c,), ascending, and their new values, if `full` is None."""
        if not self._places:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=self.published.torch_dtype)
        if len(self._places) == 1:
            return self._places[0], self._values[0]
        places, values = torch.cat(self._places), torch.cat(self._values)
        order = places.argsort(stable=True)  # of equal places the newest comes last
        places, values = places[order], values[order]
        is_last = torch.cat([places[1:] != places[:-1], torch.ones(1, dtype=torch.bool)])
        return places[is_last], values[is_last]

    def check(self, expected: str) -> None:
        """Compare the digest of the new values. Raises: PublishError if it is another one."""
        if self.full is not None:
            found = as_text(run_digest(self.full.reshape(-1)))
        elif self._own is None or self._digest is None:
            return  # the values are elsewhere
        else:
            places, values = self.changes
            old = taken(self._own, places)
            found = as_text(added(int(self._digest, 16), -digest_at(places, old), digest_at(places, values)))
        if found != expected:
            raise PublishError(
                f"{self.published.name} would have the digest {found}, and its version has {expected}; nothing was "
                "applied. Let the publisher write whole values again"
            )

    @torch.no_grad()
    def apply(self) -> None:
        """Write the new values into the tensor."""
        assert self._own is not None
        if self.full is not None:
            self._own.copy_(self.full)
        else:
            put(self._own, *self.changes)

    def _copied(self) -> Tensor:
        """The copy in which dense and lossless parts are staged."""
        if self.full is None:
            if self._own is None:
                raise PublishError(
                    f"{self.published.name} has changes that are coded by the values before, which are elsewhere; "
                    'update a model, or publish with encoding="gaps"'
                )
            self.full = self._own.detach().cpu().clone(memory_format=torch.contiguous_format)
            put(self.full, *self.changes)
        return self.full


def stage_version(
    source: VersionSource, manifest: VersionManifest, kind: Kind, staged: Mapping[str, StagedTensor]
) -> int:
    """Read the parts of one kind of a version, and stage them. Returns the bytes that were read.

    Of a version without tensors in `staged`, files are compared with their records alone.

    Raises:
        VanishedError: the version was removed meanwhile.
        PublishError: it is damaged, or has other tensors.
        OSError: the source cannot be read.
    """
    tensors, nbytes = manifest.tensors if staged else (), 0
    if unknown := [each.name for each in tensors if each.name not in staged]:
        raise PublishError(f"version {manifest.version} has {listing(unknown)}, which later ones have not")
    for each in tensors if kind == "whole" else ():
        staged[each.name].begin_whole()
    for record in manifest.files_of(kind):
        try:
            data = _read(source, manifest.version, record)
            for each in tensors:
                for part in each.parts(kind):
                    if part.file == record.name:
                        staged[each.name].add(part, data)
        except DamagedError as error:
            raise PublishError(
                f"version {manifest.version} of {source} is damaged: {error}; nothing was applied, "
                f"{remedy(manifest.version)}"
            ) from error
        nbytes += record.size_bytes
    return nbytes


def _read(source: VersionSource, version: int, record: FileRecord) -> dict[str, Tensor]:
    """Read a file, and compare it with its record. Raises: DamagedError."""
    data = source.read(version, record)
    if len(data) != record.size_bytes:
        raise DamagedError(f"{record.name} has another size than its {record.size_bytes} bytes")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise DamagedError(f"{record.name} does not have the contents that were written")
    try:
        return parse_named(memoryview(data))[0]
    except DamagedError as error:
        raise DamagedError(f"{record.name}: {error}") from error


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
        problem = ""
        try:
            manifest = source.manifest(version)
            known = values if held is not None and _follows(manifest, held) else {}
            values = {}
            for kind in manifest.kinds:
                if kind == "patch" and not known:
                    stage_version(source, manifest, kind, {})
                    continue
                staged = {each.name: StagedTensor(each, None, None) for each in manifest.tensors}
                for name, before in known.items() if kind == "patch" else ():
                    staged[name].begin_whole(before)
                stage_version(source, manifest, kind, staged)
                for name, each in staged.items():
                    each.check(each.published.after)
                    assert each.full is not None
                    values[name] = each.full
            held = manifest if values else None
        except (PublishError, OSError) as error:
            values, held, problem = {}, None, str(error)
        yield VersionVerdict(version, problem, bool(values))


def _follows(manifest: VersionManifest, held: VersionManifest) -> bool:
    """Whether a version is a patch of another. Raises: PublishError if it says so and is not."""
    if manifest.base != held.version:
        return False
    if {each.name: each.before for each in manifest.tensors} != held.digests or manifest.run != held.run:
        raise PublishError(f"version {manifest.version} is no patch of version {held.version}, which it names")
    return True
