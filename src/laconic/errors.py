"""Errors that name a mistake which a user can fix."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class JobError(ValueError):
    """A mistake that the user can fix. Commands show the message without a traceback, and exit with code 2."""


class RanksDifferError(ValueError, RuntimeError):
    """Ranks of one job run different programs, or one of them does not take part.

    A ValueError, as it may be raised for settings before training; a RuntimeError, as transfers raise in training.
    """


@contextlib.contextmanager
def writing(what: str, folder: Path, remedy: str, failure: type[Exception] = OSError) -> Iterator[None]:
    """Turn a `failure` of the block, which writes `what` into `folder`, into a JobError that ends with the remedy.

    Raises:
        JobError: the disk is full, the folder is read-only or forbidden, or the like.
    """
    try:
        yield
    except failure as error:
        raise JobError(f"cannot write {what} into {str(folder)!r}: {error}; make room there{remedy}") from error
