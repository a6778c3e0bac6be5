"""Prepared data in memory-mapped files: an index file, and one file of plain numbers for each array.

[Note: One writer per node]
Local rank 0 of each node prepares the corpus. It writes each file under a temporary name and then renames it. So a
reader sees a whole file or none, also after a run was killed, or if nodes share the folder. The index file comes last.
File names have a hash of all that decides the content. The other ranks wait in `RankGroup.agree`, then map the files.

[Note: Damaged arrays]
Wrong tokens train without an error, so nothing here is trusted. The index has the size and the SHA-256 of every array,
and a SHA-256 of itself. Local rank 0 reads every byte of the arrays at each start: a sample would miss a page of zeros.
Several threads hash 1.7 GB/s each where the processor has SHA instructions, or as fast as the disk reads. The pages are
then in memory for training. A damaged array is written again from the corpus. The digest of the index stands for all
tokens, so nodes compare it before the first step (train/prepare.py).
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from laconic.config import JobError
from laconic.store.files import replacing, write_text

_FORMAT = 4  # raise it when the files change: runs then ignore files of the old format
_CHUNK_BYTES = 1 << 24  # one thread hashes a chunk at a time
_MAX_THREADS = 8


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
        problem = _damage(index)
    except OSError as error:
        raise JobError(
            f"the tokenised data {str(index)!r} cannot be read: {error}; mend the folder, or set data.cache to another"
        ) from error
    if problem:
        print(
            f"the tokenised data is damaged and is made again from the corpus: {problem}", file=sys.stderr, flush=True
        )
    return not problem


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Create the folder for the block, which writes prepared data there.

    Raises:
        JobError: the folder cannot be created or written, for example because the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot create the folder for tokenised data {str(folder)!r}: {error}") from error
    try:
        yield
    except OSError as error:
        raise JobError(
            f"cannot write tokenised data into {str(folder)!r}: {error}; make room there, or set data.cache to a "
            "folder on another disk"
        ) from error


def write_array(index: Path, name: str, values: np.ndarray) -> None:
    """Write a small array whole; large ones are written piece by piece to `array_path`."""
    with replacing(array_path(index, name), durable=False) as path:
        path.write_bytes(values.tobytes())


def write_index(index: Path, dtypes: Mapping[str, np.dtype[Any]], summary: Mapping[str, Any]) -> None:
    """Write the index of arrays that are all written, with their types, and what else `summary` has."""
    content = {
        "dtypes": {name: dtype.name for name, dtype in dtypes.items()},
        "nbytes": {name: array_path(index, name).stat().st_size for name in dtypes},
        "sha256": {name: _hash_of(array_path(index, name)) for name in dtypes},
        **summary,
    }
    write_text(index, json.dumps({**content, "digest": _digest(content), "name": index.stem}), durable=False)


def read_index(index: Path) -> dict[str, Any]:
    """The content of an index. Its "digest" is equal only for equal arrays, types and summaries.

    Raises:
        JobError: the index cannot be read, or is damaged.
    """
    try:
        content = json.loads(index.read_bytes())
        name, digest = content.pop("name"), content.pop("digest")
        if name == index.stem and digest == _digest(content):
            return {**content, "digest": digest}
        problem = "its content does not match its digest or its name"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise JobError(
        f"the index of tokenised data {str(index)!r} is damaged ({problem}); start again, to have it made anew"
    )


def map_array(index: Path, name: str) -> np.ndarray:
    """Map an array into memory.

    Raises:
        JobError: the index is damaged, or the array does not have the size that the index gives.
    """
    content = read_index(index)
    dtype, path = content["dtypes"][name], array_path(index, name)
    if (problem := _wrong_size(path, content["nbytes"][name])) is not None:
        raise JobError(f"{problem}; start again, to have it made anew")
    if content["nbytes"][name] == 0:  # numpy cannot map an empty file
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _damage(index: Path) -> str | None:
    """The first damage of the files of an index; None if they are whole."""
    try:
        content = read_index(index)
    except JobError as error:
        return str(error).partition(";")[0]
    for name, size in content["nbytes"].items():
        path = array_path(index, name)
        if (problem := _wrong_size(path, size)) is not None:
            return problem
        if _hash_of(path) != content["sha256"][name]:
            return f"{path} does not have the SHA-256 of its index"
    return None


def _wrong_size(path: Path, size: int) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    found = path.stat().st_size
    return None if found == size else f"{path} has {found} bytes, its index says {size}"


def _hash_of(path: Path) -> str:
    """The SHA-256 of the SHA-256 of each chunk of a file; threads share the chunks."""
    with path.open("rb") as file, ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
        starts = range(0, os.fstat(file.fileno()).st_size, _CHUNK_BYTES)
        hashes = threads.map(partial(_hash_of_chunk, file.fileno()), starts)
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def _hash_of_chunk(descriptor: int, start: int) -> bytes:
    return hashlib.sha256(os.pread(descriptor, _CHUNK_BYTES, start)).digest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
