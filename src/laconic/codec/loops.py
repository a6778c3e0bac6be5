"""Loops over values on a CPU: numba compiles them once, and keeps their code on disk. And the values, as arrays."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(*constants: bytes) -> Callable[[_F], _F]:
    """Compile a function without Python's lock, and keep the code where a folder for it can be written.

    numba finds kept code by the function's file and name. `constants` are those of other files that the code has in it:
    the name gets their digest.
    """
    mark = hashlib.sha256(b"".join(constants)).hexdigest()[:12]

    def compile_(function: _F) -> _F:
        function.__qualname__ += f"_{mark}"
        try:
            return cast(_F, numba.njit(function, nogil=True, cache=True))
        except RuntimeError:  # no such folder
            return cast(_F, numba.njit(function, nogil=True))

    return compile_


def array_of(values: Tensor) -> np.ndarray:
    """The elements of a contiguous tensor on the CPU as an array in the same memory, which it keeps alive.

    `Tensor.numpy()` would forbid for good that the storage is resized, and the engine frees full buffers so.
    """
    assert values.is_contiguous()
    dtype = torch.empty(0, dtype=values.dtype).numpy().dtype
    memory: Any = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    memory.owner = values
    return np.frombuffer(memory, dtype).reshape(values.shape) if values.nbytes else np.empty(values.shape, dtype)
