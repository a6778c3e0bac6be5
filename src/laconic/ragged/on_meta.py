"""The results of a call without their elements, and torch's own errors: torch runs the call on tensors without memory.

[Note: Asked of torch first]
A rank that holds only a part cannot see that a dim is out of range, that shapes do not fit, or that a result has
another shape; a rank that holds nothing sees no error at all, and the others would wait for it. So a call that is more
than element by element on parts that are cut alike is made on meta tensors of the global shapes first. torch then
raises its own error, the same on all ranks, and tells the shapes that results must have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def results_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The results of `func`, on meta; None if they depend on values, or `func` does not run without memory.

    Raises what torch raises for a call of these shapes, dtypes and numbers.
    """
    try:
        return results_of(func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs)))
    except NotImplementedError:
        return None


def results_of(result: Any) -> list[Any]:
    """The results of a call, which are one or some."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an aten function by name, with defaults."""
    return {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(func._schema.arguments)
    }


def checked(handler: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """A handler that runs after torch has been asked: [Note: Asked of torch first]."""

    def ask_and_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = results_on_meta(func, args, kwargs)
        result = handler(func, args, kwargs)
        if wanted is not None:
            shapes, found = ([tuple(each.shape) for each in one] for one in (wanted, results_of(result)))
            assert found == shapes, f"{func} gives {found}, and torch {shapes}"
        return result

    return ask_and_run
