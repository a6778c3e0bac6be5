"""Where the codes of a tensor are made: in triton's kernels on CUDA, in numba's loops on a CPU, or in a chain of torch.

[Note: Kernels of codecs]
Coding in few bits is a chain of a dozen operations on every element. On a CPU each of them runs over a piece that lies
in the processor's caches; compiled code was not faster there. On an accelerator each would read and write device
memory. So on CUDA two kernels of triton, codec/blocked_triton.py, read a piece and write its message, or the reverse.
Two more, of layers/scaled_triton.py, do the same for the formats with scales. Blocks that no kernel holds, and other
accelerators, leave the chain as it is, with equal bits. What is coded without loss has no such chain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


def kernels_for(tensor: Tensor, name: str) -> ModuleType | None:
    """A module of kernels of laconic, such as "codec.blocked_triton"; None where they do not run, or in a graph.

    Those of triton run on CUDA, and those of numba on a CPU.
    """
    runs = tensor.is_cpu if name.endswith("_numba") else tensor.is_cuda
    if not runs or type(tensor) is not Tensor or torch.compiler.is_compiling():
        return None
    return _kernels(name)


@lru_cache
def _kernels(name: str) -> ModuleType | None:
    try:
        return import_module(f"laconic.{name}")
    except ImportError:
        return None


def coder_on(device_type: str, what: Literal["lossless", "lossless_gradients"]) -> ModuleType:
    """The module that codes without loss on a device: numba's loops on a CPU, triton's kernels on CUDA.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: no module is for the device.
    """
    package = {"cpu": "numba", "cuda": "triton"}.get(device_type)
    if package is None:
        raise ValueError(f"nothing codes without loss on {device_type!r}; use wire='exact' or '4bit'")
    module = _kernels(f"codec.{what}_{package}")
    if module is None:
        raise ModuleNotFoundError(
            f"{package} is not installed, which codes without loss on {device_type!r}: pip install {package}; or use "
            "wire='exact' or '4bit' (a publisher: encoding='gaps')",
            name=package,
        )
    return module


def coder_of(tensor: Tensor, what: Literal["lossless", "lossless_gradients"]) -> ModuleType:
    """See `coder_on`: that of the tensor's device."""
    return coder_on("cuda" if tensor.is_cuda else tensor.device.type, what)


def kept(make: Callable[..., R]) -> Callable[..., R]:
    """Keep what a function returns, by its arguments; but not in a graph that is compiled, which makes its own."""
    cached = lru_cache(make)

    @wraps(make)
    def look_up(*arguments: Any) -> R:
        return make(*arguments) if torch.compiler.is_compiling() else cached(*arguments)

    look_up.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return look_up
