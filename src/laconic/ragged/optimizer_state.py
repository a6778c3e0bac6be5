"""Optimizer state that is loaded in another cut becomes RaggedTensors again.

torch loads optimizer state by replacing tensors. What replaces a RaggedTensor may be the whole tensor, from a full
state dict, or a DTensor of torch's own: [Note: RaggedTensors are DTensors] in ragged/spec.py. A rank would then
step its own part of the whole tensor only, and the whole would be wrong. So state is cut as its parameter is cut: by a
hook after `load_state_dict`, before a step, and before laconic writes a checkpoint. An optimizer gets that hook before
its first step. Before later steps the state of one parameter is looked at, because not all code that loads state calls
`load_state_dict`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laconic.ragged.steps import OptimizerStep, before_step
from laconic.ragged.tensor import RaggedTensor

_NUMBERS = {"step", "mu_product", "eta", "mu"}
"""State of torch's optimizers that is one number, whatever the parameter's shape."""
_HAS_HOOK = "_laconic_cuts_state"
"""The attribute of optimizers that have the hook."""


def cut_like(template: RaggedTensor, whole: Tensor) -> RaggedTensor:
    """Cut a whole tensor, or a DTensor in another cut, as `template` is cut. Collective for a DTensor; a copy."""
    return torch.empty_like(template, dtype=whole.dtype, requires_grad=False).copy_(whole)  # type: ignore[return-value]


@torch.no_grad()
def cut_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut all state that has another cut than its parameter, unless the optimizer does so itself when it loads."""
    if getattr(optimizer, "cuts_loaded_state", False):
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, RaggedTensor):
            for key, value in state.items():
                if _is_like(parameter, key, value):
                    state[key] = cut_like(parameter, value)


def move_state(optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give parameters the state of those that they replace, as `fully_shard` replaces a model's, cut as they are.

    Args:
        optimizer: its groups hold the new parameters already; its state may still belong to the old ones.
        pairs: (old, new) parameters.

    Raises:
        ValueError: the optimizer has state that cannot be cut as its parameter is. Nothing has moved then.
    """
    moved = [(old, new, optimizer.state[old]) for old, new in pairs if optimizer.state.get(old)]
    for _, new, state in moved:
        for key, value in state.items():
            is_whole = isinstance(value, Tensor) and value.dim() > 0
            if is_whole and (value.shape != new.shape or getattr(optimizer, "cuts_loaded_state", False)):
                raise ValueError(
                    f"{type(optimizer).__name__} has the state {key!r} of shape {tuple(value.shape)} already, which "
                    f"cannot be cut as its parameter of shape {tuple(new.shape)} is: shard the model first, and load "
                    "the optimizer's state afterwards"
                )
    for old, new, _ in moved:
        optimizer.state[new] = optimizer.state.pop(old)
    cut_state(optimizer)


def _is_like(parameter: RaggedTensor, key: str, value: Any) -> bool:
    """True for state with an entry for each element of the parameter, in another cut."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    if isinstance(value, RaggedTensor):
        return value.spec != parameter.spec
    return value.dim() > 0 or key not in _NUMBERS


@before_step
def _cut_before(step: OptimizerStep) -> None:
    optimizer, first = step.optimizer, next(iter(step.ragged), None)
    if first is None or getattr(optimizer, "cuts_loaded_state", False):
        return
    if not hasattr(optimizer, _HAS_HOOK):
        setattr(optimizer, _HAS_HOOK, True)
        optimizer.register_load_state_dict_post_hook(cut_state)
        cut_state(optimizer)
    elif any(_is_like(first, key, value) for key, value in optimizer.state.get(first, {}).items()):
        cut_state(optimizer)
