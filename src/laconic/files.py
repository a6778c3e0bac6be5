"""Functions that write a file whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename the file that the block writes there to `path`.

    A reader sees the old file or the new file, never a part. If the block fails, the temporary file is removed and
    `path` stays as it was. If several processes replace one path, the last to finish wins.

    The folder of `path` must exist. With `durable` the new file is fsynced before the rename, so a power cut leaves the
    old file or the new file. After a call of `sync` on the folder, it leaves the new file.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Create or replace the file `path` with `text`, in UTF-8; see `replacing`."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Make the content of a file, or the list of files in a folder, survive a power cut (fsync). Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
