"""Coding in few kernels on accelerators.

[Note: Fused coding]
Coding is a chain of a dozen operations on every element. On a CPU each of them runs over a piece that lies in the
processor's caches; compiled code was not faster there. On an accelerator each would read and write device memory. So
torch.compile makes one or two kernels of the chain (Triton's, on CUDA), once for all sizes. A compiled product and sum
may be rounded once instead of twice, so a value in the middle between two codes may take the other one. Decoded values
have equal bits all the same: [Note: Codes are whole multiples of a step] in codec/blocked.py. Where no compiler works,
the chain runs as it is, and a warning says so.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

R = TypeVar("R")


class Fused:
    """A function of tensors, compiled when it is called first."""

    def __init__(self, function: Callable[..., R], *, backend: str = "inductor") -> None:
        """`backend` is the compiler, a name of `torch.compile`."""
        self._plain = function
        self._compiled: Callable[..., R] | None = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function, or the function itself if it cannot be compiled here."""
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any kind, as compilers fail in many ways
                self._compiled = None
                reason = str(error).strip().splitlines() or [""]
                warnings.warn(
                    "codecs run in many small kernels, which takes longer, because torch.compile failed: "
                    f"{type(error).__name__}: {reason[0]}; install Triton and a C compiler",
                    stacklevel=2,
                )
        return self._plain(*arguments)


def fused(function: Callable[..., R], device: torch.device) -> Callable[..., R]:
    """Return `function` as few kernels of `device`: [Note: Fused coding]."""
    return function if device.type == "cpu" else _fused(function)


@lru_cache
def _fused(function: Callable[..., R]) -> Callable[..., R]:
    return Fused(function)
