"""Rows that Hugging Face `datasets` reads: from a folder of `save_to_disk`, from files, or from the Hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from laconic.config import DataConfig, JobError


class TableRows(NamedTuple):
    """The rows of one split."""

    rows: Iterable[dict[str, Any]]
    identity: str
    """A text that changes with the rows, where the time stamps of files do not tell; else empty."""


def local_rows(path: Path, config: DataConfig) -> TableRows:
    """Open a folder of `save_to_disk`, a file, or a folder of files. Files are read as a stream, without a copy.

    Raises:
        JobError: `datasets` cannot read it, or it has no such split.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    shown = f"data.path = {str(path)!r}"
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            data = load_from_disk(str(path))
        elif path.is_file():
            data = load_dataset(str(path.parent), data_files=path.name, streaming=True)
        else:
            data = load_dataset(str(path), config.subset, streaming=True)
    except Exception as error:  # pyarrow, fsspec and datasets each raise their own
        raise JobError(
            f"{shown} is no folder of datasets' save_to_disk, and no file or folder that datasets can read: {error}"
        ) from error
    if isinstance(data, dict):  # a DatasetDict, or an IterableDatasetDict
        if config.split not in data:
            advice = "; point to one split's folder, or set data.split" if isinstance(data, DatasetDict) else ""
            raise JobError(f"{shown} has the splits {sorted(data)} and no {config.split!r} (data.split){advice}")
        data = data[config.split]
    return TableRows(data, "")


def hub_rows(config: DataConfig) -> TableRows:
    """Download a split from the Hub, or find it in the cache of `datasets`.

    Raises:
        JobError: no hub can be reached, or the Hub has no such data set, configuration or split.
    """
    from datasets import load_dataset

    try:
        data = load_dataset(config.path, config.subset, split=config.split)
    except Exception as error:  # requests, huggingface_hub and datasets each raise their own
        raise JobError(
            f"data.path = {config.path!r} is no file or folder here, and datasets cannot load it from the Hub: "
            f"{error}; check the name, data.subset and data.split, or download the data set and set data.path to its "
            "folder"
        ) from error
    return TableRows(data, repr([file["filename"] for file in data.cache_files]))  # the names have the revision's hash
