"""Documents from files and datasets, in the same order on every machine."""

import fnmatch
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from laconic.config import DataConfig, JobError

Rows = Iterable[dict[str, Any]]
"""The rows of one split."""


def _rows_of(config: DataConfig, path: Path) -> tuple[Rows, str]:
    """Open a folder of `save_to_disk`, a file, a folder of files, or a split of the Hub.

    Files are read as a stream, without a copy. A split of the Hub is downloaded, or found in the cache of `datasets`.
    Return the rows, and the name of their revision on the Hub, or "".

    Raises:
        JobError: `datasets` cannot read it, no hub can be reached, or it has no such configuration or split.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    try:
        if not path.exists():
            data = load_dataset(config.path, config.subset, split=config.split)
            return data, repr([file["filename"] for file in data.cache_files])  # the names have the revision's hash
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            data = load_from_disk(str(path))
        elif path.is_file():
            data = load_dataset(str(path.parent), data_files=path.name, streaming=True)
        else:
            data = load_dataset(str(path), config.subset, streaming=True)
    except Exception as error:  # pyarrow, fsspec, requests, huggingface_hub and datasets each raise their own
        shown = f"data.path = {config.path!r} is no"
        if path.exists():
            problem = f"{shown} folder of datasets' save_to_disk, and no file or folder that datasets can read: {error}"
        else:
            problem = (
                f"{shown} file or folder here, and datasets cannot load it from the Hub: {error}; check the name, "
                "data.subset and data.split, or download the data set and set data.path to its folder"
            )
        raise JobError(problem) from error
    if isinstance(data, dict):  # a DatasetDict, or an IterableDatasetDict
        if config.split not in data:
            advice = "; point to one split's folder, or set data.split" if isinstance(data, DatasetDict) else ""
            raise JobError(
                f"data.path = {str(path)!r} has the splits {sorted(data)} and no {config.split!r} (data.split){advice}"
            )
        data = data[config.split]
    return data, ""


_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")


class Document(NamedTuple):
    """One document."""

    name: str
    """The source of the document, for messages: a file, and a line or row in the file."""
    fields: Mapping[str, Any]
    """The fields of the row. A whole file has one, `data.text_field`, in bytes."""

    def text(self, field: str) -> bytes:
        """The text of a field, in UTF-8.

        Raises:
            JobError: the document has no such field, or the field holds no text, or one with a NUL byte.
        """
        text = self.fields.get(field)
        if isinstance(text, str):
            text = text.encode("utf-8", errors="surrogatepass")
        if not isinstance(text, bytes):
            content = f"holds {text!r:.80} there" if field in self.fields else f"has only {sorted(self.fields)}"
            raise JobError(
                f"{self.name} has no text in the field {field!r} (data.text_field): it {content}; conversations must "
                "be tokens, in the field 'input_ids': docs/fine-tune.md"
            )
        if (where := text.find(b"\0")) >= 0:  # a sign of binary data, and a separator of documents
            raise JobError(f"{self.name} is binary, not text: a NUL byte at offset {where}; take it out of the corpus")
        return text


class Corpus(NamedTuple):
    """The documents of a source."""

    documents: Callable[[], Generator[Document]]
    """Yields all documents."""
    identity: str
    """A text that changes whenever the documents may have changed."""


def open_corpus(config: DataConfig) -> Corpus:
    """Find the source of a job's documents. `Corpus.documents` raises JobError for a document that is unreadable.

    Raises:
        JobError: the source does not exist, cannot be read or has no file.
    """
    try:
        return _open_corpus(config)
    except OSError as error:
        raise JobError(f"data.path = {config.path!r} cannot be read: {error}") from error


def _open_corpus(config: DataConfig) -> Corpus:
    if config.kind == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _files(root, "*.py", skipped=_STDLIB_SKIPPED)
        return _of_files(files, config, f"the standard library's sources in {root}")
    assert config.path is not None  # DataConfig requires it
    root = Path(config.path)
    if not root.exists():
        if config.kind == "datasets" and _HUB_NAME.fullmatch(config.path):
            return _of_rows(*_rows_of(config, root), config)
        raise JobError(
            f"data.path = {config.path!r} does not exist; put the corpus back (tokenised data belongs to it), "
            "or give the path that it has now"
        )
    if config.kind == "datasets":
        files = _files(root, "*") if root.is_dir() else [root]
        return _of_rows(_rows_of(config, root)[0], _stamp(config, files), config)
    return _of_files(_files(root, "*") if root.is_dir() else [root], config, f"data.path = {config.path!r}")


def _files(root: Path, pattern: str, *, skipped: Collection[str] = ()) -> list[Path]:
    """List the regular files below `root` in byte order of their relative names, without hidden and skipped names."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths = [Path(folder, name) for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return [path for _, path in sorted(found)]


def _of_files(files: list[Path], config: DataConfig, source: str) -> Corpus:
    """Each file is a document."""
    if not files:
        raise JobError(f"{source} holds no file for data.kind = {config.kind!r}")

    def documents() -> Generator[Document]:
        for path in files:
            try:
                yield Document(str(path), {config.text_field: path.read_bytes()})
            except OSError as error:
                raise JobError(f"cannot read {path}: {error}") from error

    return Corpus(documents, _stamp(config, files))


def _of_rows(rows: Rows, identity: str, config: DataConfig) -> Corpus:
    def documents() -> Generator[Document]:
        number = -1
        try:
            for number, row in enumerate(rows):
                yield Document(f"{config.path}, row {number}", row)
        except Exception as error:  # pyarrow, fsspec and datasets each raise their own
            raise JobError(f"cannot read {config.path} after row {number}: {error!r}") from error

    return Corpus(documents, identity)


def _stamp(config: DataConfig, files: list[Path]) -> str:
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return repr((config.kind, config.subset, config.split, stats))
