"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename the file that the body writes there to `path`.

    A reader sees the old file or the new one, never a part. If the body fails, the temporary file is removed and `path`
    stays as it was. Several processes may replace one path: the last to finish wins.

    Args:
        path: the file to create or replace; its folder must exist.
        durable: fsync the new file first, so that a power cut leaves one of the two files. The name itself is durable
            once the caller calls `sync_folder`.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if durable:
            _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Create or replace the file `path` with `text`, in UTF-8, as `replacing` does."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
