"""Files of tensors and plain values, in the format of safetensors.

[Note: Plain values in a safetensors file]
The core depends on torch alone, so it writes the format by itself: the length of a JSON header, the header with the
dtype, shape and place of every tensor, and the tensors' bytes. Any program that reads safetensors reads the tensors.
Each has the name of its place in the values, such as `inner.weight.exp_avg`. The values are JSON in the header's
metadata, in which `{"$tensor": name}` stands for a tensor. Nothing is pickled. Who reads a file has compared its digest
with the manifest's, so a damaged file is never parsed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.store.files import sync
from laconic.store.folder import DamagedError, FileRecord

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
STORABLE = frozenset(_NAMES)
"""The dtypes that a file can hold."""
_LENGTH_BYTES = 8


def write(path: Path, values: Any) -> FileRecord:
    """Write a new file durably, and return its record.

    `values` has dicts with string keys, lists, strings, numbers, booleans, None and tensors on the host. Tensors are
    read while the file is written, without a copy.

    Raises:
        OSError: the file cannot be written.
        TypeError: a value is of another type.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_without_tensors(values, "", tensors))
    return write_named(path, tensors, {"values": text})


def write_named(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a new file of contiguous tensors on the host by name, durably, and return its record.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    hashed = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(_LENGTH_BYTES, "little"), text, *map(_bytes_of, tensors.values())):
            hashed.update(chunk)
            file.write(chunk)
    sync(path)
    return FileRecord(name=path.name, size_bytes=_LENGTH_BYTES + len(text) + end, sha256=hashed.hexdigest())


def parse(data: bytes | memoryview) -> Any:
    """Return the values of a file with these bytes. Raises: DamagedError if it is no file of `write`."""
    tensors, metadata = parse_named(data)
    with _as_damage():
        return with_tensors(json.loads(metadata["values"]), tensors)


def parse_named(data: bytes | memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of any safetensors file by name, as copies, and its metadata.

    Raises:
        DamagedError: it is no such file.
    """
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    body = memoryview(data)[begin:]
    with _as_damage():
        header = json.loads(bytes(data[_LENGTH_BYTES:begin]))
        metadata = header.pop("__metadata__", {})
        _check_places([entry["data_offsets"] for entry in header.values()], len(body))
        tensors = {
            name: tensor_of(body[slice(*entry["data_offsets"])], _DTYPES[entry["dtype"]], entry["shape"])
            for name, entry in header.items()
        }
        return tensors, metadata


def _check_places(places: list[list[int]], num_bytes: int) -> None:
    """Refuse tensors that share bytes, or leave some out, as safetensors does: a small file could fill any memory."""
    end = 0
    for begin, next_end in sorted(places):
        if begin != end or next_end < begin:
            raise ValueError(f"a tensor begins at byte {begin}, and the one before it ends at byte {end}")
        end = next_end
    if end != num_bytes:
        raise ValueError(f"the tensors end at byte {end} of {num_bytes}")


@contextmanager
def _as_damage() -> Iterator[None]:
    """Turn whatever the bytes of a damaged file raise into a DamagedError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
        raise DamagedError(f"it is no file of tensors and values ({type(error).__name__}: {error})") from error


def tensor_of(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Copy a tensor out of its bytes. Raises: ValueError if they are too few or too many."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} has {len(data)} bytes")
    raw = bytearray(data)
    empty = torch.empty(0, dtype=torch.uint8)
    return (torch.frombuffer(raw, dtype=torch.uint8) if raw else empty).view(dtype).view(shape)


def with_tensors(values: Any, tensors: Mapping[Any, Tensor]) -> Any:
    """Put the tensors into the places of `{"$tensor": key}`."""
    if isinstance(values, dict):
        if values.keys() == {"$tensor"}:
            return tensors[values["$tensor"]]
        return {key: with_tensors(value, tensors) for key, value in values.items()}
    return [with_tensors(value, tensors) for value in values] if isinstance(values, list) else values


def _without_tensors(values: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Put a reference in the place of every tensor, and add the tensor, contiguous, to `tensors`."""
    if isinstance(values, Tensor):
        if place in tensors or values.dtype not in _NAMES:
            raise TypeError(f"a file of tensors has no place for a second {place!r}, or for {values.dtype}")
        tensors[place] = values.detach().contiguous()
        return {"$tensor": place}
    if isinstance(values, dict):
        return {key: _without_tensors(value, f"{place}.{key}".strip("."), tensors) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_without_tensors(value, f"{place}.{index}".strip("."), tensors) for index, value in enumerate(values)]
    if values is None or isinstance(values, str | bool | int | float):
        return values
    raise TypeError(f"a file of tensors has no place for a value of type {type(values).__name__}")


def _bytes_of(tensor: Tensor) -> Any:
    """View the bytes of a contiguous tensor on the host. The tensor must outlive the view."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
