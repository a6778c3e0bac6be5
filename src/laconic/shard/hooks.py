"""The tensors in a module's arguments and outputs, and autograd's reports that backward has reached them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from laconic import _compat


class Watching(Protocol):
    """A unit that gets the reports: [Note: When a unit is done with backward] in shard/unit.py."""

    def begin_backward(self, hook: OutputGradients) -> None:
        """Backward reaches the outputs that `hook` watches."""

    def await_inputs(self, node: Any) -> None:
        """The graph has a node that will report gradients at the inputs."""

    def reach_inputs(self, node: Any) -> None:
        """Backward reaches the inputs that `node` watches."""


class OutputGradients:
    """A hook on the outputs of one forward, which runs at the first gradient. It lives as long as the graph."""

    def __init__(self, unit: Watching) -> None:
        self._unit = unit

    def __call__(self, gradient: Tensor | None) -> None:
        """Report the first gradient, which may be None."""
        self._unit.begin_backward(self)

    def follow(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as an output whose gradient, or whose tangent's gradient, runs the hook."""
        return _Followed.apply(self, tensor) if tensor.is_floating_point() else tensor


class _Followed(torch.autograd.Function):
    """The identity on an output; its backward runs a hook."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hook: OutputGradients, output: Tensor) -> Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook = inputs[0]
        ctx.set_materialize_grads(False)  # an output without a gradient has None, not zero

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.hook(gradient)
        return None, gradient

    @staticmethod
    def jvp(ctx: Any, hook: None, tangent: Tensor | None) -> Any:
        return None if tangent is None else _Followed.apply(ctx.hook, tangent)


def watch_inputs(unit: Watching, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return `inputs` as the forward shall use them, so that backward reports the arrival of their gradients."""
    return _InputGradients.apply(unit, *inputs)


class _InputGradients(torch.autograd.Function):
    """The identity on the inputs of one forward; its backward reports that gradients have reached them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: Watching, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in inputs)  # else torch would refuse to change them in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.unit = inputs[0]
        ctx.unit.await_inputs(ctx)
        ctx.set_materialize_grads(False)  # an input without a gradient has None, not zero

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.unit.reach_inputs(ctx)
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, unit: None, *tangents: Tensor) -> Any:
        return tangents


class AwaitedHooks:
    """The hooks on outputs and inputs that backward has yet to run for one unit.

    They die with their graph, also if a forward is never run backward.
    """

    def __init__(self, unit: Watching) -> None:
        self._unit = unit
        self.outputs: WeakSet[OutputGradients] = WeakSet()
        self.inputs: WeakSet[Any] = WeakSet()

    def clear(self) -> None:
        """Await nothing any more."""
        self.outputs.clear()
        self.inputs.clear()

    def watch_inputs(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a forward as it shall use them."""
        watched = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not watched:
            return args, kwargs
        identities = dict(zip(map(id, watched), watch_inputs(self._unit, watched), strict=True))
        return map_tensors(lambda tensor: identities.get(id(tensor), tensor), (args, kwargs))

    def watch_outputs(self, output: Any, *, name: str, trains: bool) -> Any:
        """Return the output of a forward as others shall use it. `trains` says whether the unit's parameters do.

        Raises:
            ValueError: the output may hide tensors. Without a hook on them, backward would find the weights freed.
        """
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        hook = OutputGradients(self._unit)
        if tensors:
            self.outputs.add(hook)
            for tensor in tensors:
                tensor.register_hook(hook)
        if _compat.in_transform():  # there, an output may need an outer graph's gradient without saying so
            return map_tensors(lambda tensor: tensor if tensor.requires_grad else hook.follow(tensor), output)
        if not tensors and (self.inputs or trains):
            for leaf in leaves_of(output):
                if not isinstance(leaf, Tensor | str | bytes | int | float | complex | bool | None):
                    raise ValueError(
                        f"{name} returns a {type(leaf).__name__}, in which its tensors cannot be found, and nothing "
                        "else that needs a gradient; return tensors, or lists, tuples, dicts or dataclasses of them, "
                        "or register the type with torch.utils._pytree.register_pytree_node"
                    )
        return output


_ATOMS = frozenset({type(None), bool, int, float, str})
"""The types of arguments that hold no tensor. Most arguments are these, tuples, lists, dicts or tensors. torch's
function, which knows trees of any kind, takes several times as long, three times for each unit and step."""


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a copy of `tree` in which `function(tensor)` stands for each tensor. Equal dataclasses are not copied."""
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(map_tensors(function, item) for item in tree)
    if kind is dict:
        return {key: map_tensors(function, item) for key, item in tree.items()}
    if kind in _ATOMS:
        return tree

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # in a container of another type
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
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, Tensor):
        return [tree]
    if kind is tuple or kind is list or kind is dict:
        items = tree.values() if kind is dict else tree
        return [leaf for item in items for leaf in leaves_of(item)]
    leaves = []
    for leaf in tree_leaves(tree):
        leaves += leaves_of(_values(leaf)) if _is_dataclass(leaf) else [leaf]
    return leaves


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
