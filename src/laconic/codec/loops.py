"""Loops over values on a CPU: numba compiles them once, and keeps their code on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

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
