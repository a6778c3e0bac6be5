"""Which handler runs an aten function that gets a RaggedTensor, what torch says of the call, and what to do instead.

[Note: Asked of torch first]
A rank that holds only a part cannot see that a dim is out of range, that shapes do not fit, or that a result has
another shape; a rank that holds nothing sees no error at all, and the others would wait for it. So a call that is more
than element by element on parts that are cut alike is made on meta tensors of the global shapes first. torch then
raises its own error, the same on all ranks, and tells the shapes that results must have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function of (aten function, positional arguments, keyword arguments)."""


class _Handlers(dict[Any, Handler]):
    """Handlers by overload or packet; an overload that was called once has its own entry."""

    of_others: Callable[[Any], Handler]
    """Makes the handlers of all aten functions that have none."""

    def __missing__(self, func: Any) -> Handler:
        own = None if func._schema.overload_name.endswith("out") else self.get(func.overloadpacket)
        self[func] = own or self.of_others(func)
        return self[func]


handlers = _Handlers()


def implements(*functions: Any, asks_torch: bool = False) -> Callable[[Handler], Handler]:
    """Make the decorated handler run aten functions that get a RaggedTensor, as in torchao's tensor subclasses.

    Give overloads (`aten.norm.Scalar`), or packets (`aten.clone`, which stands for all its overloads but those that
    write to `out`). `asks_torch`: see [Note: Asked of torch first].
    """

    def register(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(functions, _checked(handler) if asks_torch else handler))
        return handler

    return register


def results_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The results of `func`, on meta; None if they depend on values, or `func` does not run without memory.

    Raises what torch raises for a call of these shapes, dtypes and numbers.
    """
    try:
        return results_of(func(*_on_meta(args), **_on_meta(kwargs)))
    except NotImplementedError:
        return None


def results_of(result: Any) -> list[Any]:
    """The results of a call, which are one or some."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    if isinstance(value, dict):
        return {key: _on_meta(each) for key, each in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an aten function by name, with defaults."""
    return {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(func._schema.arguments)
    }


def _checked(handler: Handler) -> Handler:
    """A handler that runs after torch has been asked: [Note: Asked of torch first]."""

    def ask_and_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = results_on_meta(func, args, kwargs)
        result = handler(func, args, kwargs)
        if wanted is not None:
            shapes, found = ([tuple(each.shape) for each in one] for one in (wanted, results_of(result)))
            assert found == shapes, f"{func} gives {found}, and torch {shapes}"
        return result

    return ask_and_run


# -- remedies ---------------------------------------------------------------------------------------------------------

HISTOGRAM = (
    "A histogram, a plot or an array of a sharded tensor needs all its elements: use tensor.full_tensor(), which every "
    "rank must call, or tensor.to_local() for those of this rank"
)
_HISTOGRAMS = {"aten::histc", "aten::histogram", "aten::histogramdd", "aten::bincount", "aten::bucketize"}
_GENERAL = (
    "Use .to_local() for this rank's elements, .full_tensor() for all of them, or call the sharded module, which "
    "gathers its parameters"
)
_CALLS = {"__call__", "_call_impl", "_wrapped_call_impl", "inner"}
"""How torch calls a module."""


def remedy_for(func: Any) -> str:
    """What the caller of the aten function `func`, which is not defined on a RaggedTensor, can do instead."""
    if func._schema.name in _HISTOGRAMS:
        return HISTOGRAM
    frame: FrameType | None = sys._getframe(1)
    module = method = ""
    while frame is not None:
        if text := _remedy_in(frame):
            return text
        name, holder = frame.f_code.co_name, frame.f_locals.get("self")
        if isinstance(holder, torch.nn.Module) and name not in _CALLS:
            module, method = type(holder).__name__, name  # the outermost, which the user knows
        frame = frame.f_back
    if not method:
        return _GENERAL
    if method == "forward":
        return (
            f"{module}.forward ran outside of the forward of the unit that has the parameter: make {module} a unit of "
            f"its own, or a part of the unit that calls it. {_GENERAL}"
        )
    return (
        f"{module}.{method} ran outside of the unit's forward, where parameters are gathered: call "
        f"torch.distributed.fsdp.register_fsdp_forward_method(module, {method!r}) first, or {method} before "
        f"fully_shard. {_GENERAL}"
    )


def _remedy_in(frame: FrameType) -> str:
    """The remedy of a function that is at work; empty for most functions."""
    name, holder = frame.f_code.co_name, frame.f_locals.get("self")
    if frame.f_globals.get("__name__") == "torch.nn.init" and not name.startswith("_"):
        return (
            f"nn.init.{name} needs the whole tensor: call it before fully_shard, or fill a plain tensor from one seed "
            f"on every rank and copy it: whole = torch.empty(p.shape); nn.init.{name}(whole); then p.copy_(whole) "
            "under torch.no_grad()"
        )
    if isinstance(holder, torch.optim.Optimizer):
        return (
            f"{type(holder).__name__} needs whole tensors. Optimizers that work element by element, such as AdamW and "
            "SGD, step sharded parameters as they are; for whole matrices there are laconic.optim.Muon and Shampoo. "
            "Or let it step plain tensors that p.full_tensor() makes on every rank, and copy them back with p.copy_()"
        )
    if name in ("stage_backward_input", "stage_backward_weight"):
        return (
            "A schedule of torch's pipelines that splits backward looks for the parameters that the forward has used: "
            "shard its stages with reshard_after_forward=False, or with cache='rank'; or let laconic.pipeline run it"
        )
    return ""
