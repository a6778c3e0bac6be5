"""Tensors inside the arguments and results of modules: torch's pytrees, and dataclasses."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a copy of `tree` in which `function(tensor)` stands for each tensor. Equal dataclasses are not copied."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not _is_dataclass(leaf):
            return leaf
        old = _values(leaf)
        new = {name: map_tensors(function, value) for name, value in old.items()}
        if all(left is right for left, right in zip(tensors_in(old), tensors_in(new), strict=True)):
            return leaf
        changed = copy.copy(leaf)
        for name, value in new.items():
            object.__setattr__(changed, name, value)  # also if the class is frozen
        return changed

    return tree_map(visit, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of `tree`, in the order in which `map_tensors` visits them."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of `tree`: everything but containers and dataclasses."""
    leaves = []
    for leaf in tree_leaves(tree):
        leaves += leaves_of(_values(leaf)) if _is_dataclass(leaf) else [leaf]
    return leaves


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
