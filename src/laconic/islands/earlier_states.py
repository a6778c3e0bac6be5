"""States that earlier releases have written: an index file and files of parts, side by side in the run's folder.

The first line of each file is the SHA-256 of all that follows, in hexadecimal. The second line is JSON: the plain
values, in which `{"$tensor": i}` stands for tensor i, and the dtype and the shape of every tensor. The bytes of the
tensors follow, one after the other. The values of an index have the checksums of the parts.
"""

import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from laconic.store.folder import DamagedError
from laconic.store.tensors import tensor_of, with_tensors

FILES = r"(?:\.index|-fragment-\d+\.part)(?:\.[0-9a-f]+\.tmp)?"
"""The endings of the files of a state, and of what an interrupted write has left."""
_DIGEST = 64
"""The characters of a SHA-256."""


def manifest(data: bytes) -> dict[str, Any]:
    """Return the fields of the manifest that an index file stands for. Raises: KeyError, TypeError, ValueError."""
    values = parse(data)
    parts = [dict(zip(("name", "sha256", "size_bytes"), part, strict=True)) for part in values.pop("parts")]
    return {**values, "files": parts}


def parse(data: bytes | memoryview, digest: str | None = None) -> Any:
    """Return the values of a file with these bytes. With `digest`, its checksum must be this one.

    Raises:
        DamagedError: a byte is not as it was written, or the checksum is not `digest`.
    """
    data = memoryview(data)
    first, body = bytes(data[:_DIGEST]), data[_DIGEST + 1 :]
    if bytes(data[: _DIGEST + 1]) != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise DamagedError("its bytes do not match its checksum")
    if digest is not None and first != digest.encode():
        raise DamagedError("it is another file than was written there")
    try:
        line = bytes(body).partition(b"\n")[0]
        head, end = json.loads(line), len(line) + 1
        tensors: dict[int, Tensor] = {}
        for name, shape in head["tensors"]:
            dtype = getattr(torch, name)
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            tensors[len(tensors)] = tensor_of(body[begin:end], dtype, shape)
        return with_tensors(head["values"], tensors)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
        raise DamagedError(f"it is no file of a state ({type(error).__name__}: {error})") from error
