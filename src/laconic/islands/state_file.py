"""A file of plain values and tensors, behind a checksum of every byte.

[Note: A state file]
The first line is the SHA-256 of all that follows, in hexadecimal. The second line is JSON: the plain values, in which
`{"$tensor": i}` stands for tensor i, and the dtype and the shape of every tensor. The bytes of the tensors follow, one
after the other. A reader compares the checksum before it looks at anything else, so a damaged file is never parsed.
Nothing is pickled.
"""

import ctypes
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.comm.entries import parse as parse_json
from laconic.store.files import replacing

_FORMAT = "laconic-state-1"
_DIGEST = 64
"""The characters of a SHA-256."""


class DamagedFileError(ValueError):
    """The bytes are not those that were written, or of another format."""


def write(path: Path, values: Any) -> tuple[str, int]:
    """Create or replace a file, durably; return its checksum and its size in bytes.

    `values` has dicts with string keys, lists, strings, numbers, booleans, None and tensors on the host. Tensors are
    read while the file is written, without a copy.

    Raises:
        OSError: the file cannot be written.
        TypeError: a value is of another type.
    """
    tensors: list[Tensor] = []
    plain = _without_tensors(values, tensors)
    head = json.dumps({"format": _FORMAT, "values": plain, "tensors": [_describe(each) for each in tensors]})
    chunks = [memoryview(head.encode() + b"\n"), *(memoryview(_bytes_of(each)) for each in tensors)]
    hashed = hashlib.sha256()
    for chunk in chunks:
        hashed.update(chunk)
    with replacing(path) as new, new.open("wb") as file:
        file.write(hashed.hexdigest().encode() + b"\n")
        for chunk in chunks:
            file.write(chunk)
    return hashed.hexdigest(), _DIGEST + 1 + sum(chunk.nbytes for chunk in chunks)


def parse(data: bytes | memoryview, digest: str | None = None) -> Any:
    """Return the values of a file with these bytes. With `digest`, its checksum must be this one.

    Raises:
        DamagedFileError: a byte is not as it was written, the checksum is not `digest`, or the format is another one.
    """
    data = memoryview(data)
    first, body = bytes(data[: _DIGEST + 1]), data[_DIGEST + 1 :]
    if first != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise DamagedFileError("its bytes do not match its checksum")
    if digest is not None and first[:_DIGEST] != digest.encode():
        raise DamagedFileError("it is another file than was written there")
    try:
        end = _end_of_line(body)
        head = parse_json(bytes(body[:end]), most_bytes=end)
        if head["format"] != _FORMAT:
            raise DamagedFileError(f"its format is {head['format']!r}, and this version reads {_FORMAT!r}")
        return _with_tensors(head["values"], list(_cut(body[end + 1 :], head["tensors"])))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise DamagedFileError(f"its format is not {_FORMAT!r} ({type(error).__name__}: {error})") from error


def _end_of_line(body: memoryview) -> int:
    step = 1 << 16
    for start in range(0, len(body), step):
        found = bytes(body[start : start + step]).find(b"\n")
        if found >= 0:
            return start + found
    raise ValueError("there is no second line")


def _describe(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _bytes_of(tensor: Tensor) -> Any:
    """View the bytes of a contiguous tensor on the host. The tensor must outlive the view."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def _cut(body: memoryview, described: list[Any]) -> Iterator[Tensor]:
    """Copy the tensors out of the bytes."""
    begin = 0
    for name, shape in described:
        dtype = getattr(torch, name)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(body) - begin:
            raise ValueError("a tensor goes beyond the end of the file")
        raw = bytearray(body[begin : begin + nbytes])
        empty = torch.empty(0, dtype=torch.uint8)
        yield (torch.frombuffer(raw, dtype=torch.uint8) if raw else empty).view(dtype).view(shape)
        begin += nbytes


def _without_tensors(values: Any, tensors: list[Tensor]) -> Any:
    """Put a reference in the place of every tensor, and append the tensor, contiguous, to `tensors`."""
    if isinstance(values, Tensor):
        tensors.append(values.detach().contiguous())
        return {"$tensor": len(tensors) - 1}
    if isinstance(values, dict):
        return {key: _without_tensors(value, tensors) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_without_tensors(value, tensors) for value in values]
    if values is None or isinstance(values, str | bool | int | float):
        return values
    raise TypeError(f"a state file has no place for a value of type {type(values).__name__}")


def _with_tensors(values: Any, tensors: list[Tensor]) -> Any:
    if isinstance(values, dict):
        if values.keys() == {"$tensor"}:
            return tensors[values["$tensor"]]
        return {key: _with_tensors(value, tensors) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_tensors(value, tensors) for value in values]
    return values
