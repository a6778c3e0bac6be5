"""One message where the output of a run cannot be written."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from laconic.config import JobError


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes `what` into `folder`, into a JobError.

    Raises:
        JobError: the disk is full, the folder is read-only or forbidden, or the like.
    """
    try:
        yield
    except OSError as error:
        raise JobError(
            f"cannot write {what} into {str(folder)!r}: {error}; make room there or mend the folder, and go on with "
            "--train.resume auto"
        ) from error
