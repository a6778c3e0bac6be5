"""The shapes of a call's results, and torch's own errors: torch runs the call on tensors without memory.

[Note: Asked of torch first]
A rank that holds only a part cannot see that a dim is out of range, that shapes do not fit, or that a result has
another shape; a rank that holds nothing sees no error at all, and the others would wait for it. So a call that is more
than element by element on parts that are cut alike is made on meta tensors of the global shapes first. torch then
raises its own error, the same on all ranks, and tells the shapes that results must have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Shapes = list[tuple[int, ...] | None]
"""The shape of each result; None for one that is no tensor."""


def shapes_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes | None:
    """The shapes of the results of `func`; None if they depend on values, or `func` does not run without memory.

    Raises what torch raises for a call of these shapes, dtypes and numbers.
    """
    try:
        result = func(*_on_meta(args), **_on_meta(kwargs))
    except NotImplementedError:
        return None
    return [tuple(each.shape) if isinstance(each, Tensor) else None for each in results_of(result)]


def results_of(result: Any) -> list[Any]:
    """The results of a call, which are one or some."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    if isinstance(value, dict):
        return {key: _on_meta(each) for key, each in value.items()}
    return value


def checked(handler: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """A handler that runs after torch has been asked: [Note: Asked of torch first]."""

    def ask_and_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = shapes_on_meta(func, args, kwargs)
        result = handler(func, args, kwargs)
        if shapes is not None:
            found = [tuple(each.shape) if isinstance(each, Tensor) else None for each in results_of(result)]
            assert found == shapes, f"{func} gives {found}, and torch {shapes}"
        return result

    return ask_and_run
