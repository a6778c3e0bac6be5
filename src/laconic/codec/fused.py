"""One chain of operations on every device: compiled, as kernels of its own, or with tables that are kept.

[Note: Fused coding]
Coding is a chain of a dozen operations on every element. On a CPU each of them runs over a piece that lies in the
processor's caches; compiled code was not faster there. On an accelerator each would read and write device memory. So on
CUDA two kernels of triton, codec/blocked_triton.py, read a piece and write its message, or the reverse. Two more, of
layers/scaled_triton.py, do the same for the formats with scales. Other accelerators, and codecs and blocks that no
kernel holds, leave the chain to torch.compile, once for all sizes. A compiled product and sum may be rounded once
instead of twice, so a value in the middle between two codes may take the other one. Decoded values have equal bits all
the same: [Note: Codes are whole multiples of a step] in codec/blocked.py. Where no compiler works, the chain runs as it
is, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class Fused:
    """A function of tensors, compiled when it is called first. Its results need no gradient."""

    def __init__(self, function: Callable[..., R], *, backend: str = "inductor") -> None:
        """`backend` is the compiler, a name of `torch.compile`."""
        self._plain = function
        self._compiled: Callable[..., R] | None = torch.compile(
            _with_own_code(function), dynamic=True, fullgraph=True, backend=backend
        )

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function, or the function itself if it cannot be compiled here."""
        if self._compiled is not None:
            try:
                # torch.compile compiles anew for each state of these, and gives up at the eighth time
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    return self._compiled(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any kind, as compilers fail in many ways
                self._compiled = None
                reason = " ".join(str(error).split()[:40])
                warnings.warn(
                    "codecs run in many small kernels, which takes longer, because torch.compile failed: "
                    f"{type(error).__name__}: {reason}; install Triton and a C compiler",
                    stacklevel=2,
                )
        return self._plain(*arguments)


def _with_own_code(function: Callable[..., R]) -> Callable[..., R]:
    """A copy of a function or bound method: torch.compile counts what it compiles by code, which instances share."""
    plain = getattr(function, "__func__", function)
    copy = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    return MethodType(copy, function.__self__) if isinstance(function, MethodType) else copy


def fused(function: Callable[..., R], device: torch.device) -> Callable[..., R]:
    """Return `function` as few kernels of `device`: [Note: Fused coding]."""
    return function if device.type == "cpu" else _fused(function)


@lru_cache
def _fused(function: Callable[..., R]) -> Callable[..., R]:
    return Fused(function)


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
