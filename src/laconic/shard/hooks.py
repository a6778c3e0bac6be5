"""The tensors in a module's arguments and outputs, and autograd's reports that backward has reached them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from laconic import _compat


class OutputGradients:
    """A hook on the outputs of one forward, which runs at each gradient. It lives as long as the graph."""

    def __init__(self, awaited: AwaitedHooks) -> None:
        self._awaited = awaited

    def __call__(self, gradient: Tensor | None) -> None:
        """Report a gradient, which may be None."""
        self._awaited.outputs.discard(ref(self))
        self._awaited.begin()

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


class _InputGradients(torch.autograd.Function):
    """The identity on the inputs of one forward; its backward reports that gradients have reached them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(awaited: AwaitedHooks, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(Tensor.detach, inputs))  # else torch would refuse to change them in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.awaited = inputs[0]
        ctx.awaited.inputs.add(ref(ctx, ctx.awaited.inputs.discard))
        ctx.set_materialize_grads(False)  # an input without a gradient has None, not zero

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.awaited.inputs.discard(ref(ctx))
        ctx.awaited.end()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, awaited: None, *tangents: Tensor) -> Any:
        return tangents


class AwaitedHooks:
    """The hooks on outputs and inputs that backward has yet to run for one unit.

    They die with their graph, also if a forward is never run backward. A WeakSet would take calls in Python for what
    these sets of references do without. See [Note: When a unit is done with backward] in shard/unit.py.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """`begin` is called when backward reaches outputs, and `end` when it reaches inputs."""
        self.begin, self.end = begin, end
        self.outputs: set[ref[OutputGradients]] = set()
        self.inputs: set[ref[Any]] = set()

    def clear(self) -> None:
        """Await nothing any more."""
        self.outputs.clear()
        self.inputs.clear()

    def watch_inputs(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a forward as it shall use them."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # most often
            return (_compat.apply_function(_InputGradients, self, *args) if args[0].requires_grad else args), kwargs
        watched = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not watched:
            return args, kwargs
        made = _compat.apply_function(_InputGradients, self, *watched)
        identities = dict(zip(map(id, watched), made, strict=True))
        if len(args) == len(watched) and not kwargs and all(map(operator.is_, args, watched)):  # most often
            return tuple(identities[id(tensor)] for tensor in watched), kwargs
        return map_tensors(lambda tensor: identities.get(id(tensor), tensor), (args, kwargs))

    def watch_outputs(self, output: Any, *, name: str, trains: Callable[[], bool]) -> Any:
        """Return the output of a forward as others shall use it. `trains` says whether the unit's parameters do.

        Raises:
            ValueError: the output may hide tensors. Without a hook on them, backward would find the weights freed.
        """
        if isinstance(output, Tensor):  # most often
            tensors = [output] if output.requires_grad else []
        else:
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        hook = OutputGradients(self)
        if tensors:
            self.outputs.add(ref(hook, self.outputs.discard))
            for tensor in tensors:
                tensor.register_hook(hook)
        if _compat.in_transform():  # there, an output may need an outer graph's gradient without saying so
            return map_tensors(lambda tensor: tensor if tensor.requires_grad else hook.follow(tensor), output)
        if not tensors and (self.inputs or trains()):
            for leaf in leaves_of(output):
                if not isinstance(leaf, Tensor | str | bytes | int | float | complex | bool | None):
                    raise ValueError(
                        f"{name} returns a {type(leaf).__name__}, in which its tensors cannot be found, and nothing "
                        "else that needs a gradient; return tensors, or lists, tuples, dicts or dataclasses of them, "
                        "or register the type with torch.utils._pytree.register_pytree_node"
                    )
        return output


class SavedWeights:
    """Looks at what autograd saves in the forwards of one unit, so that backward never meets freed weights.

    [Note: Losses past the outputs]
    Backward gathers a unit when gradients reach its outputs. The loss of a tensor that the forward has kept, or that a
    hook on an inner layer has taken, reaches operations of the unit without its outputs. They would find freed memory:
    an error about storages, or a crash of the process. So a unit has what autograd saves in its first forwards packed.
    Weights that are unpacked while the unit rests gather it, and begin its backward. Such a unit packs in all forwards
    from then on. The others stop: packing takes two calls in Python for each tensor that is saved. Should such a loss
    come later, autograd finds that the weights have another version while they are freed, and raises its own error.

    Where somebody packs already, as activation checkpointing does, the unit does not.
    """

    _NUM_FORWARDS = 3

    def __init__(self, modules: Sequence[nn.Module], gather: Callable[[], bool]) -> None:
        """Look at the forwards of `modules`. `gather` gathers the unit if it rests, and returns whether it did."""
        self._gather = gather
        self._num_left = self._NUM_FORWARDS * len(modules)
        self._is_needed = False
        self.looks = True
        """False once the unit has not needed it in its first forwards."""
        self._open: list[tuple[nn.Module, Any]] = []
        # the hooks run also after a forward that raised
        self._leave_hooks = [module.register_forward_hook(self.leave, always_call=True) for module in modules]

    def enter(self, module: nn.Module, weights: Callable[[], Sequence[Tensor]]) -> None:
        """Begin to pack, in a forward of `module` that has a graph; `weights` are the unit's gathered parameters."""
        if not self._num_left and not self._is_needed:
            for handle in self._leave_hooks:
                handle.remove()
            self._leave_hooks.clear()
            self.looks = False
        elif _compat.may_pack_saved_tensors(_Packer):
            self._num_left = max(0, self._num_left - 1)
            hooks = torch.autograd.graph.saved_tensors_hooks(_Packer(self, weights()), _unpack)
            hooks.__enter__()
            self._open.append((module, hooks))

    @_compat.outside_compilation
    def leave(self, module: nn.Module, *_: Any) -> None:
        """End to pack: the forward of `module` is over."""
        if self._open and self._open[-1][0] is module:
            self._open.pop()[1].__exit__(None, None, None)

    def gather(self) -> None:
        """Gather the unit, whose weights backward is about to use."""
        self._is_needed |= self._gather()


class _Packer:
    """Packs what one forward of a unit saves."""

    def __init__(self, saved: SavedWeights, weights: Sequence[Tensor]) -> None:
        self._saved = saved
        self._storages = frozenset[int]().union(*map(_storages, weights))

    def __call__(self, tensor: Tensor) -> _Packed:
        alias = tensor.detach()  # an output that its own node holds would never be freed
        return _Packed(alias, alias._version, self._saved if self._storages & _storages(tensor) else None)


class _Packed(NamedTuple):
    tensor: Tensor
    version: int
    weights_of: SavedWeights | None
    """The unit whose weights it has."""


def _unpack(packed: _Packed) -> Tensor:
    if packed.weights_of is not None:
        if not _compat.in_backward():  # somebody looks at the graph
            return packed.tensor
        packed.weights_of.gather()  # freed weights have another version
    if packed.tensor._version != packed.version:  # torch looks only where nobody packs
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(packed.tensor.shape)}, saved in the forward of a sharded module"
        )
    return packed.tensor


def _storages(tensor: Any) -> frozenset[int]:
    """The storages of a tensor, or of those that a wrapping class holds."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return frozenset[int]().union(*(_storages(getattr(tensor, name)) for name in flatten()[0]))
    has_storage = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return frozenset([tensor.untyped_storage()._cdata] if has_storage else [])


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
    if isinstance(tree, Tensor):
        return [tree]
    found = []
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of `tree`: everything but containers and dataclasses."""
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, Tensor):
        return [tree]
    leaves: list[Any] = []
    if kind is tuple or kind is list or kind is dict:
        for item in tree.values() if kind is dict else tree:
            if isinstance(item, Tensor) or type(item) in _ATOMS:
                leaves.append(item)
            else:
                leaves += leaves_of(item)
        return leaves
    for leaf in tree_leaves(tree):
        leaves += leaves_of(_values(leaf)) if _is_dataclass(leaf) else [leaf]
    return leaves


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
