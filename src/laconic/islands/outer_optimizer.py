"""The outer parameters of a fragment, in host memory, and the outer optimizer that moves them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.ragged.tensor import RaggedTensor

MakeOuter = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an outer optimizer of the given parameters."""

nesterov: MakeOuter = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimizer (arXiv 2311.08105)."""


class OuterFragment:
    """One fragment's outer parameters: a flat fp32 buffer on the host, with this rank's part of every parameter.

    Outer parameters are the result of the last sync. Pseudo-gradients are differences from them, even if `mixing` lets
    the inner parameters start elsewhere.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], make_outer: MakeOuter, counts: Mapping[str, int] | None = None
    ) -> None:
        """Copy the inner parameters. `counts`: how many islands train each parameter; None if all train all."""
        self.parameters = dict(parameters)
        self._parts: dict[str, slice] = {}
        begin = 0
        for name, parameter in self.parameters.items():
            end = begin + flat_local(parameter).numel()
            self._parts[name] = slice(begin, end)
            begin = end
        self.flat = nn.Parameter(self.copy_inner())
        """The outer parameters, (numel,)."""
        self.optimizer = make_outer([self.flat])
        self.divisor = self._spread(counts) if counts is not None else None
        """The number of islands that train each coordinate, (numel,); None if all islands train all."""
        trained = {name: float(parameter.requires_grad) for name, parameter in self.parameters.items()}
        self._is_trained = None if all(trained.values()) else self._spread(trained)

    def _spread(self, values: Mapping[str, float]) -> Tensor:
        """Give every coordinate the value of its parameter: (numel,)."""
        spread = torch.empty_like(self.flat.detach())
        for name, part in self._parts.items():
            spread[part] = values[name]
        return spread

    def copy_inner(self) -> Tensor:
        """Copy the present inner parameters: (numel,), fp32, on the host."""
        parts = [flat_local(parameter).to("cpu", torch.float32) for parameter in self.parameters.values()]
        return torch.cat(parts) if parts else torch.empty(0)

    def pseudo_gradient(self) -> Tensor:
        """Return outer minus inner parameters, (numel,); zero where this island does not train."""
        difference = self.flat.detach() - self.copy_inner()
        return difference if self._is_trained is None else difference * self._is_trained

    def step(self, mean: Tensor) -> None:
        """Step along the mean pseudo-gradient, (numel,). Coordinates that no island trains keep value and momentum."""
        kept: list[tuple[Tensor, Tensor]] = []
        if self.divisor is not None:
            unheld = self.divisor == 0
            kept = [(vector, vector[unheld]) for vector in self.vectors() if vector.shape == unheld.shape]
        self.flat.grad = mean
        self.optimizer.step()
        self.flat.grad = None
        for vector, values in kept:
            vector[unheld] = values

    def vectors(self) -> list[Tensor]:
        """Return the outer parameters and all tensors of the outer optimizer's state, in an order all islands share."""
        state = self.optimizer.state.get(self.flat, {})
        return [self.flat.detach(), *(value for _, value in sorted(state.items()) if isinstance(value, Tensor))]

    def write_inner(self, values: Tensor, keep: float = 0.0) -> None:
        """Set the inner parameters to keep * inner + (1 - keep) * values, with values of shape (numel,)."""
        for name, parameter in self.parameters.items():
            local = flat_local(parameter)
            new = values[self._parts[name]].to(local.device)
            local.copy_(new if keep == 0 else torch.lerp(new, local.to(torch.float32), keep))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a vector like `flat`, (numel,), into one view for each parameter, sharded as the parameter is."""
        return {
            name: parameter.like(flat[self._parts[name]])
            if isinstance(parameter, RaggedTensor)
            else flat[self._parts[name]].view(parameter.shape)
            for name, parameter in self.parameters.items()
        }

    def optimizer_state(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (key, parameter's name, value) of the outer optimizer's state; for numbers the name is empty."""
        for key, value in self.optimizer.state.get(self.flat, {}).items():
            if isinstance(value, Tensor) and value.shape == self.flat.shape:
                yield from ((key, name, part) for name, part in self.named(value).items())
            elif value is not None:
                yield key, "", value

    def create_state(self) -> None:
        """Create the outer optimizer's state, all zero, so that a checkpoint can be read into it."""
        if self.optimizer.state.get(self.flat):
            return
        before = self.flat.detach().clone()
        with torch.enable_grad():
            self.step(torch.zeros_like(before))
        with torch.no_grad():
            self.flat.copy_(before)
            for vector in self.vectors()[1:]:
                vector.zero_()  # as before the first step


def flat_local(parameter: Tensor) -> Tensor:
    """Return this rank's elements of a parameter, flat: a view."""
    if isinstance(parameter, RaggedTensor):
        return parameter.to_local()
    return parameter.detach().view(-1)
