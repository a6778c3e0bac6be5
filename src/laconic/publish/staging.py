"""The tensors of a version that is being read: what will change, before anything does.

[Note: Nothing half]
A reader applies a version when it has all of it, and has found every digest right. Until then new values wait in host
memory beside the tensors. Changes with gaps wait as places and values, so a patch takes its own size. Dense and
lossless parts wait in a copy of their tensor. The digest of what a tensor will be follows from that of what it is:
[Note: Digests of published tensors] in digests.py. Patches of several versions are staged one after the other, and
applied at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.publish.changes import put, taken
from laconic.publish.digests import added, as_text, digest_at, run_digest
from laconic.publish.encodings import decode_dense, decode_gaps, decode_lossless
from laconic.publish.regions import flat_places
from laconic.publish.source import VersionSource, remedy
from laconic.publish.versions import (
    Encoding,
    Kind,
    PublishedPart,
    PublishedTensor,
    PublishError,
    VersionManifest,
    listing,
)
from laconic.store.folder import DamagedError, FileRecord
from laconic.store.tensors import parse_named

CAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes between which a reader may cast. Narrower ones need scales."""


class StagedTensor:
    """The new values of one tensor: [Note: Nothing half]."""

    def __init__(self, published: PublishedTensor, own: Tensor | None, digest: str | None) -> None:
        """Stage for `own`, a tensor of the published shape and dtype whose digest is `digest`.

        None stands for a tensor that is elsewhere, or has other values: then whole values come first, or only gaps.
        """
        self.published, self._own = published, own
        self._digest = digest
        self._full: Tensor | None = None
        self._places: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, part: PublishedPart, data: Mapping[str, Tensor]) -> None:
        """Take in a part, whose tensors are in `data`.

        Raises:
            DamagedError: the tensors are no such part.
            PublishError: it is coded by values that are elsewhere.
        """
        published, dtype = self.published, self.published.torch_dtype
        if part.encoding is Encoding.LOSSLESS:
            target = _region(self._copied(), part)
            target.copy_(decode_lossless(part, data, target))
        elif part.encoding is Encoding.GAPS:
            self._change(*decode_gaps(part, data, published.numel, dtype))
        else:
            values = decode_dense(part, data, dtype)
            if self._full is None and part.numel == published.numel:
                self.begin_whole()
            if self._full is None and self._own is None:
                places = flat_places((part.start, part.sizes), published.shape, torch.arange(part.numel))
                self._change(places, values.reshape(-1))
            else:
                _region(self._copied(), part).copy_(values)

    def _change(self, places: Tensor, values: Tensor) -> None:
        """Stage elements at places of the flattened tensor."""
        if self._full is not None:
            put(self._full, places, values)
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
        self._full = values

    @property
    def full(self) -> Tensor | None:
        """All new values, on the host, if they are known as such."""
        return self._full

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
        if self._full is not None:
            found = as_text(run_digest(self._full.reshape(-1)))
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
        if self._full is not None:
            self._own.copy_(self._full)
        else:
            put(self._own, *self.changes)

    def _copied(self) -> Tensor:
        """The copy in which dense and lossless parts are staged."""
        if self._full is None:
            if self._own is None:
                raise PublishError(
                    f"{self.published.name} has changes that are coded by the values before, which are elsewhere; "
                    'update a model, or publish with encoding="gaps"'
                )
            self._full = self._own.detach().cpu().clone(memory_format=torch.contiguous_format)
            put(self._full, *self.changes)
        return self._full


def _region(full: Tensor, part: PublishedPart) -> Tensor:
    """View the values of a run or a box, in the shape of its sizes."""
    whole = full.view(-1) if len(part.start) == 1 else full
    for dim, (begin, size) in enumerate(zip(part.start, part.sizes, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return whole


def stage_version(
    source: VersionSource, manifest: VersionManifest, kind: Kind, staged: Mapping[str, StagedTensor]
) -> int:
    """Read the parts of one kind of a version, and stage them. Returns the bytes that were read.

    Raises:
        VanishedError: the version was removed meanwhile.
        PublishError: it is damaged, or has other tensors.
        OSError: the source cannot be read.
    """
    if unknown := [each.name for each in manifest.tensors if each.name not in staged]:
        raise PublishError(f"version {manifest.version} has {listing(unknown)}, which later ones have not")
    if kind == "whole":
        for each in manifest.tensors:
            staged[each.name].begin_whole()
    nbytes = 0
    for record in manifest.files_of(kind):
        with _told(source, manifest.version):
            data = _read(source, manifest.version, record)
            for each in manifest.tensors:
                for part in each.parts(kind):
                    if part.file == record.name:
                        staged[each.name].add(part, data)
        nbytes += record.size_bytes
    return nbytes


def check_files(source: VersionSource, manifest: VersionManifest, kind: Kind) -> None:
    """Compare the files of one kind with their records. Raises: see `stage_version`."""
    for record in manifest.files_of(kind):
        with _told(source, manifest.version):
            _read(source, manifest.version, record)


@contextmanager
def _told(source: VersionSource, version: int) -> Iterator[None]:
    """Turn damage in the block into a PublishError that says which version has it."""
    try:
        yield
    except DamagedError as error:
        raise PublishError(
            f"version {version} of {source} is damaged: {error}; nothing was applied, {remedy(version)}"
        ) from error


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


def check_fit(published: Sequence[PublishedTensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are not those of a version: of another architecture, vocabulary or dtype.

    Raises:
        PublishError: names, shapes or dtypes differ. It names the first that do.
    """
    by_name = {each.name: each for each in published}
    memory = {memory_of(tensors[name]) for name in by_name if name in tensors}
    problems = [f"{name} is not in the model" for name in by_name if name not in tensors]
    problems += [
        f"{name} is not in the version"
        for name, tensor in tensors.items()
        if name not in by_name and memory_of(tensor) not in memory  # a tied tensor under a further name
    ]
    for name, each in by_name.items():
        own = tensors.get(name)
        if own is not None and tuple(own.shape) != each.shape:
            problems.append(f"{name} is {list(own.shape)} in the model and {list(each.shape)} in the version")
        elif own is not None and own.dtype != each.torch_dtype:
            own_dtype = str(own.dtype).removeprefix("torch.")
            problems.append(f"{name} is {own_dtype} in the model and {each.dtype} in the version")
    casts = [
        name for name, each in by_name.items() if name in tensors and _is_cast(tensors[name].dtype, each.torch_dtype)
    ]
    if problems:
        further = "; Reader(cast=True) reads one float dtype into another" if casts else ""
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise PublishError(
            f"{where} does not fit the model ({'; '.join(problems[:3])}{more}); read it into the architecture, "
            f"vocabulary and dtype that are published{further}"
        )


def _is_cast(dtype: torch.dtype, published: torch.dtype) -> bool:
    return dtype != published and {dtype, published} <= set(CAST_DTYPES)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of whole tensors. Cost: one pass over them."""
    return {name: as_text(run_digest(tensor.detach().reshape(-1))) for name, tensor in tensors.items()}


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """The key that tied tensors share. Each empty tensor has a key of its own."""
    place = tensor.data_ptr() if math.prod(tensor.shape) else id(tensor)
    return place, tensor.shape, tensor.stride(), tensor.dtype
