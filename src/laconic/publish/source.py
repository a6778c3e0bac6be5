"""Where versions lie: what a reader asks of any place, and a folder as such a place.

[Note: Registered readers]
A reader with a name tells the place which version it has, and which versions it is reading. In a folder it writes
`readers/NAME.json`. A publisher keeps the versions that such a reader still needs, so that it need not begin anew from
whole values. Nothing but this depends on what readers say: a reader that lies, or that is gone, keeps at most
`patience` versions, and what it says of versions that are not there is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

from laconic.comm.entries import EntryError, parse, typed
from laconic.publish.versions import MANIFEST, VERSION_NAME, PublishError, VersionManifest, version_name
from laconic.store.files import make_folder, write_text
from laconic.store.folder import DamagedError, FileRecord

READERS = "readers"
_READER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MOST_REGISTRATION_BYTES = 1 << 16


class VanishedError(PublishError):
    """A version was removed while it was read."""


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
        folder = self.folder / version_name(version)
        try:
            data = (folder / MANIFEST).read_bytes()
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise VanishedError(f"{folder} is not there any more; update again") from error
            raise PublishError(f"{folder} is damaged: its {MANIFEST} is missing; {remedy(version)}") from error
        return parse_manifest(data, version, str(folder))

    def read(self, version: int, file: FileRecord) -> bytearray:
        """See `VersionSource.read`."""
        folder = self.folder / version_name(version)
        try:
            with (folder / file.name).open("rb") as opened:
                return bytearray(opened.read(file.size_bytes + 1))
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise VanishedError(f"{folder} is not there any more; update again") from error
            raise PublishError(f"{folder} is damaged: {file.name} is missing; {remedy(version)}") from error

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
