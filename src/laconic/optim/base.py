"""The common base of this package's optimizers: checks of settings and parameters, first state, loading of state."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.ragged.dtensor import is_torch_dtensor
from laconic.ragged.optimizer_state import cut_like
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

Group = dict[str, Any]
"""A parameter group of torch.optim.Optimizer."""


class RaggedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer on RaggedTensors, or on plain tensors, whose rule needs more than one element at a time."""

    cuts_loaded_state = True
    """Says that `load_state_dict` cuts state that came in another cut: see ragged/optimizer_state.py."""

    # -- subclasses define ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _check_settings(self, group: Group) -> None:
        """Raise ValueError for a setting that the rule does not accept."""

    @abstractmethod
    def _needs_whole(self, parameter: Tensor, group: Group) -> bool:
        """True if the rule needs whole blocks or matrices of the parameter, and not single elements."""

    @abstractmethod
    def _init_state(self, parameter: Tensor, group: Group) -> None:
        """Fill `self.state[parameter]` with the state before the first step."""

    @abstractmethod
    def _step(self) -> None:
        """Take one step with the parameters that have a gradient."""

    # -- torch.optim.Optimizer -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group.

        Raises:
            ValueError: a setting is out of range, or the rule does not accept a parameter. The group is then not added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_range(group, "lr", "weight_decay")
            self._check_settings(group)
            for index, parameter in enumerate(group["params"]):
                self._check_parameter(parameter, name_of(group, index), group)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def init_state(self, parameter: Tensor) -> None:
        """Give `parameter` the state it has before its first step, unless it has state. Call it alike on every rank.

        Raises:
            ValueError: the optimizer does not have the parameter.
        """
        groups = [group for group in self.param_groups if any(parameter is other for other in group["params"])]
        if not groups:
            raise ValueError(f"a tensor of shape {tuple(parameter.shape)} is not one of this optimizer's parameters")
        if not self.state[parameter]:
            self._init_state(parameter, groups[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the parameters that have a gradient; return what `closure` returns. Collective.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, but keep the dtypes of the state; torch would cast it to the parameter's."""
        super().load_state_dict({**state_dict, "state": {}})
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        owners = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, (parameter, group) in zip(ids, owners, strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = self._loaded(parameter, group, state_dict["state"][index])

    def _loaded(self, parameter: Tensor, group: Group, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the state of one parameter; state that came in another cut is cut as a new state would be."""
        templates: dict[str, Any] = {}
        if isinstance(parameter, RaggedTensor) and not all(isinstance(value, RaggedTensor) for value in state.values()):
            self._init_state(parameter, group)
            templates = self.state.pop(parameter)
        return {
            key: value.detach().clone()
            if key == "step"
            else cut_like(templates[key], value)
            if isinstance(templates.get(key), RaggedTensor) and not isinstance(value, RaggedTensor)
            else value.to(parameter.device, copy=True)
            for key, value in state.items()
        }

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _check_parameter(self, parameter: Tensor, name: str, group: Group) -> None:
        kind = type(self).__name__
        if is_torch_dtensor(parameter):
            raise ValueError(
                f"{name} is a DTensor of shape {tuple(parameter.shape)}; {kind} takes parameters of "
                "laconic.fully_shard, or plain ones. Use torch's own optimizers with torch's own sharding"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}; {kind} trains real numbers, so leave the parameter out")

    def _with_gradient(self, group: Group) -> list[Tensor]:
        """Select the group's parameters that have a gradient, and make the state that is missing."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if parameter.grad.is_sparse:
                raise ValueError(f"{type(self).__name__} takes dense gradients; set sparse=False in the embedding")
            if not self.state[parameter]:
                self._init_state(parameter, group)
        return parameters


def check_range(group: Group, *keys: str, low: float = 0, high: float = math.inf, is_open: bool = False) -> None:
    """Check that settings lie in [low, high), or in (low, high) if `is_open`; every number of a tuple must.

    Raises:
        ValueError: a number is out of range. The message names the setting, its value and the range.
    """
    for key in keys:
        values = group[key] if isinstance(group[key], (tuple, list)) else [group[key]]
        if not all((low < value if is_open else low <= value) and value < high for value in map(float, values)):
            expected = f"{'above' if is_open else 'at least'} {low}" + (f" and below {high}" if high < math.inf else "")
            raise ValueError(f"{key} must be {expected}, got {group[key]}")


def name_of(group: Group, index: int) -> str:
    """The name of a group's parameter for messages; its place in the group if it has no name."""
    if "param_names" in group:
        return str(group["param_names"][index])
    parameter = group["params"][index]
    if isinstance(parameter, RaggedTensor):
        return parameter.spec.slot.name
    return f"parameter {index} of its group"


def zeros_beside(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, spec_of: Callable[[RaggedTensor], RaggedSpec]
) -> Tensor:
    """Zeros of a global shape, as state of `parameter`. For a RaggedTensor, `spec_of` gives the layout of the state."""
    if not isinstance(parameter, RaggedTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    spec = spec_of(parameter)
    numel = spec.extent.numel if spec.extent else 0
    return RaggedTensor(torch.zeros(numel, dtype=dtype, device=parameter.to_local().device), spec)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's elements, flat: a view, if the tensor is contiguous."""
    return tensor.to_local() if isinstance(tensor, RaggedTensor) else tensor.detach().reshape(-1)
