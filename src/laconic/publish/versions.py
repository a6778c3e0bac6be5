"""Published versions: the manifest, which says where new values of tensors stand; and the places where versions lie.

[Note: A published version]
A publication is a folder with a store for each version, `weight_v000007` ([Note: A store] in store/folder.py). A reader
sees a whole version or none. A version has plain safetensors files and a manifest, `manifest.json`. The manifest names
every tensor with its shape, its dtype and its digests before and after ([Note: Digests of published tensors] in
publish/changes.py). A version may have two kinds of parts, and has one at least:

    patch   what has changed since the version `base`. It applies to exactly this version.
    whole   all values. Newcomers, and readers that are too far behind, begin here.

A tensor's parts are in the files of the ranks that held it. No two parts of a kind overlap. `start` and `sizes` say
where a part lies: one number each for a run of the flattened tensor; one for each dim for a box, where another mesh
axis has cut the tensor. The encodings:

    gaps      `KEY.gaps` and `KEY.values`: the distance from each changed element to the next, and their new values.
              `start` is the first one's place, and `sizes` their number. The largest number of the dtype of gaps, 255
              or 65535, goes so far without a change. So the places are
              `start + gaps.cumsum(0)[gaps < largest]`.
    dense     `KEY`: all values of a run or a box.
    lossless-1
              `KEY`: the payload of `encode_in_pieces` in codec/lossless.py, which needs the values of `base`.

A whole tensor on one rank has its own name as the key and its own shape, so a version from one rank is a folder that
any reader of safetensors understands. tests/reference/publish.py has a reader of gaps and dense parts in ten lines.

[Note: Registered readers]
A reader with a name tells the place which version it has, and which versions it is reading. In a folder it writes
`readers/NAME.json`. A publisher keeps the versions that such a reader still needs, so that it need not begin anew from
whole values. Nothing but this depends on what readers say: a reader that lies, or that is gone, keeps at most
`patience` versions, and what it says of versions that are not there is passed over.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch

from laconic.comm.entries import EntryError, parse, typed
from laconic.store import folder as store
from laconic.store import tensors
from laconic.store.files import make_folder, write_text
from laconic.store.folder import DamagedError, FileRecord
from laconic.store.series import MANIFEST

VERSION_NAME = re.compile(r"weight_v([0-9]{6,12})")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
READERS = "readers"
_READER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MOST_REGISTRATION_BYTES = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{16}")

Kind = Literal["patch", "whole"]
"""The kinds of parts."""
Names = Literal["huggingface", "hub", "model"]
"""The kinds of names: those of `laconic export`, or of folders of the hub, and for a peft model those of its adapters'
file; or the model's own."""


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the sizes of a run or a box."""


class PublishError(ValueError):
    """A version could not be published or applied. Nothing of it was applied."""


class VanishedError(PublishError):
    """A version was removed while it was read."""


def version_name(version: int) -> str:
    """The name of a version's folder."""
    return f"weight_v{version:06d}"


def dtype_name(dtype: Any) -> str:
    """The name that manifests have for a dtype: torch's, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in tensors.STORABLE}


class Encoding(StrEnum):
    """How the values of a part are written: [Note: A published version]."""

    GAPS = "gaps"
    DENSE = "dense"
    LOSSLESS = "lossless-1"
    """The payload's format: [Note: Lossless differences] in codec/lossless.py. A later one has another number."""


@dataclass(frozen=True, kw_only=True)
class PublishedPart:
    """Values of one tensor in one file: [Note: A published version]."""

    file: str
    key: str
    encoding: Encoding
    start: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises: ValueError if the place makes no sense."""
        if len(self.start) != len(self.sizes) or min((*self.start, *self.sizes), default=-1) < 0:
            raise ValueError(f"a part of start {list(self.start)} and sizes {list(self.sizes)}")
        if self.encoding is Encoding.GAPS and len(self.start) != 1:
            raise ValueError(f"gaps lead along a flattened tensor, not from {list(self.start)}")

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.sizes)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the part lies in a tensor of this shape."""
        bounds = (math.prod(shape),) if len(self.start) == 1 else shape
        ends = [begin + size for begin, size in zip(self.start, self.sizes, strict=True)]
        return len(bounds) == len(ends) and all(end <= bound for end, bound in zip(ends, bounds, strict=True))


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: "bfloat16"."""
    before: str | None
    """The digest of the tensor in the version `base`; None without a patch."""
    after: str
    patch: tuple[PublishedPart, ...]
    whole: tuple[PublishedPart, ...]

    def __post_init__(self) -> None:
        """Raises: ValueError if it is no tensor, or a part does not lie in it."""
        if not self.name or self.dtype not in _DTYPES or min(self.shape, default=0) < 0:
            raise ValueError(f"a tensor {self.name!r} of dtype {self.dtype!r} and shape {list(self.shape)}")
        for digest in (self.after, self.before or self.after):
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"{self.name} has the digest {digest!r}")
        for part in (*self.patch, *self.whole):
            if not part.fits(self.shape):
                raise ValueError(f"a part of {self.name} lies outside of its shape {list(self.shape)}")
        if any(part.encoding is not Encoding.DENSE for part in self.whole):
            raise ValueError(f"whole values of {self.name} are not dense")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def parts(self, kind: Kind) -> tuple[PublishedPart, ...]:
        """The parts of one kind."""
        return self.patch if kind == "patch" else self.whole


@dataclass(frozen=True, kw_only=True)
class VersionManifest(store.Manifest):
    """The contents of `manifest.json`: [Note: A published version]."""

    FORMAT = "laconic-weights-1"

    run: str
    """Who publishes. Versions of one folder have the same."""
    version: int
    base: int | None
    """The version that the patch applies to; None without a patch."""
    is_whole: bool
    """Whether all values are there, too."""
    step: int | None
    """The optimizer step, if the publisher told."""
    names: Names
    tensors: tuple[PublishedTensor, ...]

    def __post_init__(self) -> None:
        """Raises: ValueError if fields contradict each other, or a file is not in the folder."""
        if not self.is_whole and self.base is None:
            raise ValueError("it has neither a patch nor whole values")
        if self.version < 1 or (self.base is not None and not 1 <= self.base < self.version):
            raise ValueError(f"version {self.version} of base {self.base}")
        listed = [record.name for record in self.files]
        for record in self.files:
            if not FILE_NAME.fullmatch(record.name) or record.name == MANIFEST:
                raise ValueError(f"it names a file outside its folder, {record.name!r}")
            if record.sha256 is None:
                raise ValueError(f"{record.name} has no digest")
        if len(set(listed)) < len(listed) or len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("it names a file or a tensor twice")
        for tensor in self.tensors:
            if unlisted := {part.file for part in (*tensor.patch, *tensor.whole)}.difference(listed):
                raise ValueError(f"{tensor.name} is in {min(unlisted)!r}, a file that it does not list")
            if self.is_whole and sum(part.numel for part in tensor.whole) != tensor.numel:
                raise ValueError(f"whole values of {tensor.name} are not those of all its elements")
            if (tensor.before is None) != (self.base is None):
                raise ValueError(f"{tensor.name} has the digest {tensor.before} before, and the base is {self.base}")

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of parts that the version has."""
        kinds: tuple[tuple[Kind, bool], ...] = (("patch", self.base is not None), ("whole", self.is_whole))
        return [kind for kind, is_there in kinds if is_there]

    def files_of(self, kind: Kind) -> list[FileRecord]:
        """The files with parts of one kind."""
        used = {part.file for tensor in self.tensors for part in tensor.parts(kind)}
        return [record for record in self.files if record.name in used]

    def nbytes(self, kind: Kind) -> int:
        """The bytes of the files with parts of one kind."""
        return sum(record.size_bytes for record in self.files_of(kind))

    @property
    def digests(self) -> dict[str, str]:
        """The digests of all tensors in this version."""
        return {tensor.name: tensor.after for tensor in self.tensors}

    def to_json(self) -> dict[str, Any]:
        """See `Manifest.to_json`."""
        tensors = [
            vars(each) | {kind: [dict(vars(part)) for part in getattr(each, kind)] for kind in ("patch", "whole")}
            for each in self.tensors  # no `asdict`: it copies each number
        ]
        return {**super().to_json(), "tensors": tensors}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """See `Manifest.from_json`. Raises: ValueError."""
        return typed(cls, {name: value for name, value in body.items() if name != "format"})


# -- places with versions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The news of a reader: [Note: Registered readers]."""

    version: int | None
    """The version that it has; None for none, or one that nobody published."""
    reading: tuple[int, ...] = ()
    """The versions that it is reading."""

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the registration of `to_text`. Raises: EntryError for anything else."""
        return typed(cls, parse(data, most_bytes=MOST_REGISTRATION_BYTES))


class VersionSource(Protocol):
    """A place with versions, as readers see it: a folder, or anything that serves one."""

    def versions(self) -> list[int]:
        """The numbers of the versions that are there, ascending. Raises: OSError, PublishError."""

    def manifest(self, version: int) -> VersionManifest:
        """Read the manifest of a version.

        Raises:
            VanishedError: the version is not there any more.
            PublishError: it is damaged, or that of another version.
            OSError: it cannot be read.
        """

    def read(self, version: int, file: FileRecord) -> bytearray:
        """Read all of a file. The caller compares it with its record. Raises: VanishedError, OSError."""

    def register(self, reader: str, registration: Registration) -> None:
        """Tell the publisher what a reader has and needs; a place without such a way does nothing. Raises: OSError."""


class FolderSource:
    """A folder of versions on any file system, which a `Publisher` writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def versions(self) -> list[int]:
        """See `VersionSource.versions`."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError as error:
            raise PublishError(
                f"{self.folder} is no folder of versions ({error.strerror}); give the one that the publisher writes"
            ) from error
        return sorted(int(found[1]) for name in names if (found := VERSION_NAME.fullmatch(name)))

    def manifest(self, version: int) -> VersionManifest:
        """See `VersionSource.manifest`."""
        return parse_manifest(self._read(version, MANIFEST), version, str(self.folder / version_name(version)))

    def read(self, version: int, file: FileRecord) -> bytearray:
        """See `VersionSource.read`."""
        return bytearray(self._read(version, file.name, file.size_bytes + 1))

    def _read(self, version: int, name: str, most_bytes: int = -1) -> bytes:
        folder = self.folder / version_name(version)
        try:
            with (folder / name).open("rb") as opened:
                return opened.read(most_bytes)
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise VanishedError(f"{folder} is not there any more; update again") from error
            raise PublishError(f"{folder} is damaged: its {name} is missing; {remedy(version)}") from error

    def register(self, reader: str, registration: Registration) -> None:
        """See `VersionSource.register`."""
        make_folder(self.folder / READERS)
        write_text(self.folder / READERS / f"{reader}.json", registration.to_text(), durable=False)

    def registrations(self) -> dict[str, Registration]:
        """The registrations of readers, by their names. An unreadable file is left out."""
        found = {}
        for path in sorted((self.folder / READERS).glob("*.json")):
            try:
                if path.stat().st_size <= MOST_REGISTRATION_BYTES and _READER_NAME.fullmatch(path.stem):
                    found[path.stem] = Registration.parse(path.read_bytes())
            except (OSError, EntryError):
                continue
        return found


def parse_manifest(data: bytes, version: int, where: str) -> VersionManifest:
    """The manifest of a version, as a place called `where` has it.

    Raises:
        PublishError: it is damaged, or that of another version.
    """
    try:
        manifest = VersionManifest.parse(data, f"{where}/{MANIFEST}")
    except DamagedError as error:
        raise PublishError(f"{error}; {remedy(version)}") from error
    if manifest.version != version:
        raise PublishError(f"{where} holds version {manifest.version}, not what its name says; {remedy(version)}")
    return manifest


def remedy(version: int) -> str:
    """The end of a message about a damaged version."""
    return f"let the publisher write whole values again, or remove {version_name(version)}"


def check_reader_name(name: str) -> None:
    """Raise PublishError unless the name of a reader can be that of a file."""
    if not _READER_NAME.fullmatch(name):
        raise PublishError(
            f"name={name!r} is no name of a reader; use up to 64 letters, digits, dots, dashes and underscores"
        )


def superseded(
    has_whole: Mapping[int, bool], readers: Sequence[Registration], *, keep: int, patience: int
) -> list[int]:
    """The versions that no reader needs: see [Note: Registered readers]. `has_whole` says which have whole values.

    Kept are the `keep` newest; the newest with whole values, and those after it, for newcomers; and what registered
    readers need that are at most `patience` versions behind.
    """
    numbers = sorted(has_whole)
    wholes = [number for number in numbers if has_whole[number]]
    if not wholes:
        return []
    first = min(wholes[-1], numbers[-min(keep, len(numbers))])
    oldest = numbers[-1] - patience
    reading = {version for reader in readers for version in reader.reading if version >= oldest}
    for reader in readers:
        if reader.version is not None and oldest <= reader.version < numbers[-1]:
            first = min(first, next(number for number in numbers if number > reader.version))
    return [number for number in numbers if number < first and number not in reading]
