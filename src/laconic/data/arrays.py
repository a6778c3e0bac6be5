"""Prepared data in memory-mapped files: an index file, and one file of plain numbers for each array.

[Note: One writer per node]
Local rank 0 of each node prepares the corpus. The index file is the manifest of the arrays ([Note: A store] in
store/folder.py), and comes last. Each file gets its name when it is whole, also if nodes share the folder. File names
have a hash of all that decides the content. The other ranks wait in `RankGroup.agree`, then map the files.

[Note: Damaged arrays]
Wrong tokens train without an error, so nothing here is trusted. Local rank 0 reads every byte of the arrays at each
start: a sample would miss a page of zeros. Several threads hash 1.7 GB/s each where the processor has SHA instructions,
or as fast as the disk reads. The pages are then in memory for training. A damaged array is written again from the
corpus. The checksum of the index stands for all tokens, so nodes compare it before the first step (train/prepare.py).
"""

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from laconic.errors import JobError, writing
from laconic.store.files import make_folder, replacing, sync
from laconic.store.folder import (
    CrashPoint,
    Manifest,
    commit_in_place,
    describe,
    difference,
    reached,
)

_FORMAT = 4  # raise it when the arrays change: runs then ignore files of the old format
_CHUNK_BYTES = 1 << 24  # one thread hashes a chunk at a time


@dataclass(frozen=True, kw_only=True)
class Index(Manifest):
    """The index file of some arrays. Its `checksum` is equal only for equal arrays, types and summaries."""

    FORMAT = "laconic-tokens-5"

    dtypes: dict[str, str]
    """The type of each array. The files have the same order."""
    summary: dict[str, Any]


def index_path(folder: Path, identity: Any) -> Path:
    """The index file of the data with this identity, whose `repr` is equal only for equal data."""
    return folder / f"corpus-{hashlib.sha256(repr((_FORMAT, identity)).encode()).hexdigest()[:16]}.json"


def array_path(index: Path, name: str) -> Path:
    """The file of an array."""
    return index.with_name(f"{name}-{index.stem}.bin")


def is_whole(index: Path) -> bool:
    """True if the data is there and undamaged; a line on stderr says which file is damaged.

    Cost: reads and hashes all files; see [Note: Damaged arrays].

    Raises:
        JobError: a file is there but cannot be read.
    """
    try:
        if not index.exists():
            return False
        problem = _first_damage(index)
    except OSError as error:
        raise JobError(
            f"the tokenised data {str(index)!r} cannot be read: {error}; mend the folder, or set data.cache to another"
        ) from error
    if problem:
        print(
            f"the tokenised data is damaged and is made again from the corpus: {problem}", file=sys.stderr, flush=True
        )
    return not problem


def _first_damage(index: Path) -> str:
    """The damage of the first file that has some; empty if all are whole. Raises: OSError if one cannot be read."""
    try:
        files = read_index(index).files
    except JobError as error:
        return str(error).partition(";")[0]
    problems = (difference(index.parent, record, chunk_bytes=_CHUNK_BYTES) for record in files)
    return next((f"{index.parent}: {problem}" for problem in problems if problem), "")


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Create the folder for the block, which writes prepared data there.

    Raises:
        JobError: the folder cannot be created or written, for example because the disk is full.
    """
    try:
        make_folder(folder)
    except OSError as error:
        raise JobError(f"cannot create the folder for tokenised data {str(folder)!r}: {error}") from error
    with writing("tokenised data", folder, ", or set data.cache to a folder on another disk"):
        yield


@contextlib.contextmanager
def array_file(index: Path, name: str) -> Iterator[BinaryIO]:
    """Open the file of an array for the block, which writes it piece by piece."""
    with replacing(array_path(index, name)) as path, path.open("wb") as file:
        yield file
    reached(CrashPoint.WRITTEN)


def write_index(index: Path, dtypes: Mapping[str, np.dtype[Any]], summary: Mapping[str, Any]) -> None:
    """Write the index of arrays that are all written, with their types, and what else `summary` has."""
    sync(index.parent)
    reached(CrashPoint.SYNCED)
    files = (describe(index.parent, array_path(index, name).name, chunk_bytes=_CHUNK_BYTES) for name in dtypes)
    names = {name: dtype.name for name, dtype in dtypes.items()}
    commit_in_place(index, Index(files=tuple(files), dtypes=names, summary=dict(summary)))


def read_index(index: Path) -> Index:
    """Read an index.

    Raises:
        JobError: the index cannot be read, or is damaged.
    """
    try:
        content = Index.parse(index.read_bytes(), str(index))
        if [record.name for record in content.files] == [array_path(index, name).name for name in content.dtypes]:
            return content
        problem = "its arrays are not those of its name"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise JobError(
        f"the index of tokenised data {str(index)!r} is damaged ({problem}); start again, to have it made anew"
    )


def map_arrays(index: Path) -> dict[str, np.ndarray]:
    """Map all arrays of an index into memory, by name.

    Raises:
        JobError: the index is damaged, or an array does not have the size that the index gives.
    """
    content, found = read_index(index), {}
    for record, (name, dtype) in zip(content.files, content.dtypes.items(), strict=True):
        if problem := difference(index.parent, replace(record, sha256=None)):  # `is_whole` has read the bytes
            raise JobError(f"{problem} in {str(index.parent)!r}; start again, to have it made anew")
        path = array_path(index, name)  # numpy cannot map an empty file
        found[name] = np.memmap(path, dtype=dtype, mode="r") if record.size_bytes else np.empty(0, dtype)
    return found
