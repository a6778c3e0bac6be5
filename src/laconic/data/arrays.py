"""Prepared data in memory-mapped files: an index file, and one file of plain numbers for each array.

[Note: One writer per node]
Local rank 0 of each node prepares the corpus. It writes each file under a temporary name and then renames it. So a
reader sees a whole file or none, also after a run was killed, or if nodes share the folder. The index file comes last
and has the sizes of the others: a file that was deleted, or that a power cut left empty, is written again. File names
have a hash of all that decides the content. The other ranks wait in `RankGroup.agree` and then map the files.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laconic.config import JobError
from laconic.files import replacing, write_text

_FORMAT = 3  # raise it when the files change: runs then ignore files of the old format


def index_path(folder: Path, identity: Any) -> Path:
    """The index file of the data with this identity, whose `repr` is equal only for equal data."""
    return folder / f"corpus-{hashlib.sha256(repr((_FORMAT, identity)).encode()).hexdigest()[:16]}.json"


def array_path(index: Path, name: str) -> Path:
    """The file of an array."""
    return index.with_name(f"{name}-{index.stem}.bin")


def is_whole(index: Path) -> bool:
    """True if the index can be read, and its files are there with the sizes that it gives."""
    try:
        sizes = json.loads(index.read_text())["nbytes"]
        return all(array_path(index, name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def make_folder(folder: Path) -> None:
    """Create the folder for prepared data.

    Raises:
        JobError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot create the folder for tokenised data {str(folder)!r}: {error}") from error


def write_array(index: Path, name: str, values: np.ndarray) -> None:
    """Write a small array whole; large ones are written piece by piece to `array_path`."""
    with replacing(array_path(index, name), durable=False) as path:
        values.tofile(path)


def write_index(index: Path, dtypes: Mapping[str, np.dtype[Any]], summary: Mapping[str, Any]) -> None:
    """Write the index of arrays that are all written, with their types, and what else `summary` has."""
    content = {
        "dtypes": {name: dtype.name for name, dtype in dtypes.items()},
        "nbytes": {name: array_path(index, name).stat().st_size for name in dtypes},
        **summary,
    }
    write_text(index, json.dumps(content), durable=False)


def read_index(index: Path) -> dict[str, Any]:
    """The content of an index."""
    return json.loads(index.read_text())


def map_array(index: Path, name: str) -> np.ndarray:
    """Map an array into memory."""
    dtype = read_index(index)["dtypes"][name]
    path = array_path(index, name)
    if path.stat().st_size == 0:  # numpy cannot map an empty file
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
