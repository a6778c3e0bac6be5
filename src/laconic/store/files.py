"""Functions that write files, and make and remove folders, so that a kill or a power cut does no harm.

A write is durable after fsync of the file. A new name, a rename and a removal are durable after fsync of the folder
that lists the name; before, a file system may keep any of them and lose the others.
"""

import contextlib
import os
import shutil
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


def link_or_copy(source: Path, target: Path) -> None:
    """Give a durable file one more name; copy it where the file system has no hard links. Raises: OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless it exists; it survives a power cut.

    Raises:
        OSError: the folder cannot be created.
    """
    if path.is_dir():
        return
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.absolute().parents:  # all of them: another program may have just made one, and not synced it
        with contextlib.suppress(OSError):  # a parent that this user may not read was there before
            sync(parent)


def remove(path: Path) -> None:
    """Remove a folder with its files, or a file, or a link but not its target. What cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
