"""The files of one writer of a version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from laconic.publish.encodings import EncodedPart
from laconic.publish.versions import Kind, PublishedPart
from laconic.store.folder import CrashPoint, FileRecord, reached
from laconic.store.tensors import write_named


def write_parts(
    folder: Path,
    kind: Kind,
    rank: int,
    parts: Iterable[tuple[str, EncodedPart]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    max_file_bytes: int,
) -> tuple[list[FileRecord], list[tuple[str, PublishedPart]]]:
    """Write parts of one kind, by the names of their tensors, into files of up to `max_file_bytes`, durably.

    Returns:
        The records of the files, and where each part is.

    Raises:
        OSError: a file cannot be written.
    """
    records, written = [], []
    for number, group in enumerate(_grouped(parts, max_file_bytes)):
        file = f"{kind}-{rank:05d}{f'-{number}' if number else ''}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name, part in group:
            key = _key(name, part, shapes[name])
            tensors |= {key + ending: tensor for ending, tensor in part.tensors.items()}
            written.append((name, part.stored_as(file, key)))
        # as safetensors itself does: then all tensors lie at multiples of their elements' sizes
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        records.append(write_named(folder / file, ordered, {"format": "pt"}))
        reached(CrashPoint.WRITTEN)
    return records, written


def _key(name: str, part: EncodedPart, shape: tuple[int, ...]) -> str:
    """The key of a part in a file: the tensor's own name for all of it, which any program can then read."""
    values = part.tensors.get("")
    is_all = values is not None and tuple(values.shape) == shape and not any(part.start)
    return name if is_all else f"{name}@{','.join(map(str, part.start))}"


def _grouped(parts: Iterable[tuple[str, EncodedPart]], most_bytes: int) -> Iterator[list[tuple[str, EncodedPart]]]:
    """Cut parts into groups of up to `most_bytes`, of one part at least."""
    group: list[tuple[str, EncodedPart]] = []
    nbytes = 0
    for name, part in parts:
        if group and nbytes + part.nbytes > most_bytes:
            yield group
            group, nbytes = [], 0
        group.append((name, part))
        nbytes += part.nbytes
    if group:
        yield group
