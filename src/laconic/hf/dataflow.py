"""What a model computes, told without values: every tensor has the name of the operations that it comes from.

[Note: Equal dataflow]
A model that no machine can hold has no logits to compare. On the meta device it still calls its operations, and two
runs that call the same operations on the same tensors compute the same. So a tensor's name is made of the operation,
the names of its arguments and all other arguments; parameters and inputs are named by themselves. Equal names of two
logits mean equal logits. Operations that lead nowhere do not matter, nor do views of the same shape.

A layer may read its values, as a mixture of experts does, or have no kernel for meta. What is inside of it does not
matter either, as it is called as a whole. So layers are played: a stand-in depends on all its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OF_SHAPES = {
    "ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty",
}  # fmt: skip
"""Operations whose result depends on the shape of a tensor, and not on its values."""
_VIEWS = {"view", "_unsafe_view", "alias", "detach", "expand"}
_MOST_NAMED = 64  # elements of a constant that are part of its name


class Dataflow(TorchDispatchMode):
    """Names the tensors of a run: [Note: Equal dataflow]."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """Watch the block of a `with`. `inputs` have other values in each batch."""
        super().__init__()
        self._names: dict[int, Any] = {}
        self._varying = {id(value) for value in inputs}
        self._kept: list[Tensor] = list(inputs)  # whose ids must not be used again

    def name(self, tensor: Tensor) -> Any:
        """The name of a tensor of this run."""
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if tensor.is_meta:
            return "given", id(tensor)
        values = tensor.tolist() if tensor.numel() <= _MOST_NAMED else None
        return hash(("constant", tuple(tensor.shape), str(tensor.dtype), str(values)))

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is the same in each batch: it depends on shapes alone, not on inputs or parameters."""
        return not self._varies(tensor)

    def _varies(self, tensor: Tensor) -> bool:
        return id(tensor) in self._varying or isinstance(tensor, nn.Parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given, operation = tree_leaves((args, kwargs or {})), func.overloadpacket.__name__
        tensors = [value for value in given if isinstance(value, Tensor)]
        varies = operation not in _OF_SHAPES and any(map(self._varies, tensors))
        name = hash((str(func), *(self.name(v) if isinstance(v, Tensor) else repr(v) for v in given)))
        is_same = operation in _VIEWS and output.shape == args[0].shape
        for index, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor):
                self._kept.append(tensor)
                self._names[id(tensor)] = self.name(args[0]) if is_same else hash((name, index))
                (self._varying.add if varies else self._varying.discard)(id(tensor))
        return output


@contextmanager
def played(layers: Iterable[nn.Module], run: Callable[[], object]) -> Iterator[None]:
    """Let stand-ins play the layers in the block: [Note: Equal dataflow].

    `run` runs the model. Stand-ins return tuples, as layers once did, if the model takes them; or tensors, if its code
    asks a tuple for what only a tensor has.
    """
    layers = list(layers)

    def play(*, returns_tuple: bool) -> None:
        for index, layer in enumerate(layers):
            layer.forward = _stand_in_of(index, returns_tuple)
        run()

    try:
        try:
            play(returns_tuple=True)
        except (AttributeError, TypeError):
            play(returns_tuple=False)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _stand_in_of(index: int, returns_tuple: bool) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = hidden * (index + 2)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                output = output + (value.abs() if value.is_complex() else value).sum().to(output.dtype)
        return (output,) if returns_tuple else output

    return forward
