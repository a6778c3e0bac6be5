"""Optimizer state that is loaded in another cut becomes RaggedTensors again.

torch loads optimizer state by replacing tensors. What replaces a RaggedTensor may be the whole tensor, from a full
state dict, or a DTensor of torch's own: [Note: RaggedTensors are DTensors] in ragged/placement.py. A hook after
`load_state_dict` cuts it as its parameter is cut. torch has no hook that an optimizer could get when it is made, so one
hook before every optimizer's step gives each optimizer with RaggedTensors its own. `set_optimizer_state_dict` takes a
step at first, to make the state, so an optimizer has the hook by then.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.ragged.tensor import RaggedTensor

_NUMBERS = {"step", "mu_product", "eta", "mu"}
"""State of torch's optimizers that is one number, whatever the parameter's shape."""
_FLAG = "cuts_loaded_state"
"""The attribute of optimizers that have the hook, or need none."""


def cut_like(template: RaggedTensor, whole: Tensor) -> RaggedTensor:
    """Cut a whole tensor, or a DTensor in another cut, as `template` is cut. Collective for a DTensor; a copy."""
    return torch.empty_like(template, dtype=whole.dtype, requires_grad=False).copy_(whole)  # type: ignore[return-value]


@torch.no_grad()
def _cut_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, RaggedTensor):
            for key, value in state.items():
                if _is_like(parameter, key, value):
                    state[key] = cut_like(parameter, value)


def _is_like(parameter: RaggedTensor, key: str, value: Any) -> bool:
    """True for state with an entry for each element of the parameter, in another cut."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    if isinstance(value, RaggedTensor):
        return value.spec != parameter.spec
    return value.dim() > 0 or key not in _NUMBERS


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, _FLAG, False):
        return
    has_ragged = any(isinstance(p, RaggedTensor) for group in optimizer.param_groups for p in group["params"])
    if has_ragged:
        setattr(optimizer, _FLAG, True)
        optimizer.register_load_state_dict_post_hook(_cut_state)
        _cut_state(optimizer)


register_optimizer_step_pre_hook(_before_step)
