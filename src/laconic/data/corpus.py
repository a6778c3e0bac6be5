"""Documents from files and datasets, as bytes, in the same order on every machine."""

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from laconic.config import DataConfig, JobError

_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


class Document(NamedTuple):
    """One text."""

    name: str
    """The source of the text, for messages: a file, and a line or row in the file."""
    text: bytes
    """The content in UTF-8."""


class Corpus(NamedTuple):
    """The documents of a source."""

    documents: Callable[[], Iterator[Document]]
    """Yields all documents."""
    identity: str
    """A text that changes whenever the documents may have changed."""


def open_corpus(config: DataConfig) -> Corpus:
    """Find the source of a job's documents. `Corpus.documents` raises JobError for a document that is unreadable.

    Raises:
        JobError: the source does not exist or has no file.
    """
    if config.kind == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in _files(root, "*.py") if not _STDLIB_SKIPPED & set(path.relative_to(root).parts)]
        return _of_files(files, config, f"the standard library's sources in {root}", _whole_file)
    assert config.path is not None  # DataConfig requires it
    root = Path(config.path)
    if not root.exists():
        raise JobError(f"data.path = {config.path!r} does not exist")
    if config.kind == "datasets":
        return Corpus(lambda: _dataset_rows(root, config.text_field), _stamp(config, _files(root, "*")))
    pattern = "*.jsonl" if config.kind == "jsonl" else "*"
    files = _files(root, pattern) if root.is_dir() else [root]
    return _of_files(files, config, f"data.path = {config.path!r}", _lines if config.kind == "jsonl" else _whole_file)


def _files(root: Path, pattern: str) -> list[Path]:
    """List the regular files below `root` in byte order of their relative names, without hidden files."""
    found = []
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            found.append(("/".join(parts), path))
    return [path for _, path in sorted(found)]


def _of_files(
    files: list[Path], config: DataConfig, source: str, read: Callable[[Path, DataConfig], Iterator[Document]]
) -> Corpus:
    if not files:
        raise JobError(f"{source} holds no file for data.kind = {config.kind!r}")

    def documents() -> Iterator[Document]:
        for path in files:
            try:
                yield from read(path, config)
            except OSError as error:
                raise JobError(f"cannot read {path}: {error}") from error

    return Corpus(documents, _stamp(config, files))


def _stamp(config: DataConfig, files: list[Path]) -> str:
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return repr((config.kind, config.text_field, stats))


def _whole_file(path: Path, config: DataConfig) -> Iterator[Document]:
    yield Document(str(path), path.read_bytes())


def _lines(path: Path, config: DataConfig) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
                raise JobError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise JobError(
                    f"{where} is a JSON {type(row).__name__}, not an object with a field {config.text_field!r}"
                )
            yield Document(where, _text(row, config.text_field, where))


def _dataset_rows(folder: Path, text_field: str) -> Iterator[Document]:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(folder))
    except Exception as error:  # pyarrow, fsspec and datasets each raise their own
        raise JobError(f"data.path = {str(folder)!r} is no folder of datasets' save_to_disk: {error}") from error
    if isinstance(data, DatasetDict):
        if "train" not in data:
            raise JobError(
                f"data.path = {str(folder)!r} has the splits {sorted(data)} and no 'train'; point to one split's folder"
            )
        data = data["train"]
    if text_field not in data.column_names:
        raise JobError(
            f"data.path = {str(folder)!r} has no column {text_field!r}; data.text_field is one of {data.column_names}"
        )
    for number, row in enumerate(data):
        where = f"{folder}, row {number}"
        yield Document(where, _text(row, text_field, where))


def _text(row: dict[str, Any], text_field: str, where: str) -> bytes:
    text = row.get(text_field)
    if not isinstance(text, str):
        content = f"holds {text!r} there" if text_field in row else f"has only {sorted(row)}"
        raise JobError(f"{where} has no text in the field {text_field!r} (data.text_field): it {content}")
    return text.encode("utf-8", errors="surrogatepass")
