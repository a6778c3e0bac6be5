"""Errors that name a mistake which a user can fix."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_MOST_LISTED = 8


class JobError(ValueError):
    """A mistake that the user can fix. Commands show the message without a traceback, and exit with code 2."""


class RanksDifferError(ValueError, RuntimeError):
    """Ranks of one job run different programs, or one of them does not take part.

    A ValueError, as it may be raised for settings before training; a RuntimeError, as transfers raise in training.
    """


def listing(names: Iterable[str]) -> str:
    """The first of some names, and the number of the others."""
    names = list(names)
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def say_mistake(command: str, mistake: object) -> None:
    """Print one line about a mistake, once for all ranks of a node, which share a terminal."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{command}: {' '.join(str(mistake).split())}", file=sys.stderr)


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
