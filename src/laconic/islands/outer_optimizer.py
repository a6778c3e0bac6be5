"""What islands share: the outer parameters of a fragment, in host memory, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.ragged.tensor import RaggedTensor

MakeOuter = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to the optimizer that takes outer steps on them."""

nesterov: MakeOuter = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""DiLoCo's (arXiv 2311.08105)."""


class OuterFragment:
    """One fragment's outer parameters: a flat fp32 buffer on the host, with this rank's part of every parameter.

    Outer parameters are what islands last agreed on; drift is measured from them, never from what was mixed into the
    inner ones.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], make_outer: MakeOuter, counts: Mapping[str, int] | None = None
    ) -> None:
        """`counts`: by name, how many islands train a parameter; default: all do."""
        self.parameters = dict(parameters)
        self._parts: dict[str, slice] = {}
        begin = 0
        for name, parameter in self.parameters.items():
            size = local_of(parameter).numel()
            self._parts[name] = slice(begin, begin + size)
            begin += size
        self.flat = nn.Parameter(self.gathered())
        self.optimizer = make_outer([self.flat])
        self.divisor = self._spread(counts) if counts is not None else None
        """Of summed drifts, (numel,): the islands that hold each coordinate; None if all hold all."""
        is_whole = all(parameter.requires_grad for parameter in self.parameters.values())
        trained = {name: float(parameter.requires_grad) for name, parameter in self.parameters.items()}
        self._trained = None if is_whole else self._spread(trained)

    def _spread(self, by_name: Mapping[str, float]) -> Tensor:
        spread = torch.empty_like(self.flat.detach())
        for name, part in self._parts.items():
            spread[part] = by_name[name]
        return spread

    def gathered(self) -> Tensor:
        """A copy of the inner parameters, as they are now: (numel,), fp32, on the host."""
        parts = [local_of(parameter).to("cpu", torch.float32) for parameter in self.parameters.values()]
        return torch.cat(parts) if parts else torch.empty(0)

    def drift(self) -> Tensor:
        """Outer minus inner, (numel,): a gradient for a descent optimizer. Zero where this island does not train."""
        drift = self.flat.detach() - self.gathered()
        return drift if self._trained is None else drift * self._trained

    def step(self, mean: Tensor) -> None:
        """Take an outer step along the mean drift; what no island holds stays, and its momentum too."""
        unheld = self.divisor == 0 if self.divisor is not None else None
        kept = [] if unheld is None else [(vector, vector[unheld]) for vector in self._vectors()]
        self.flat.grad = mean
        self.optimizer.step()
        self.flat.grad = None
        for vector, values in kept:
            vector[unheld] = values

    def _vectors(self) -> list[Tensor]:
        """The outer parameters and all of the outer optimizer's state that is as long."""
        state = self.optimizer.state.get(self.flat, {}).values()
        return [self.flat.detach(), *(v for v in state if isinstance(v, Tensor) and v.shape == self.flat.shape)]

    def write(self, values: Tensor, keep: float = 0.0) -> None:
        """Make the inner parameters keep * inner + (1 - keep) * values."""
        for name, parameter in self.parameters.items():
            local = local_of(parameter)
            new = values[self._parts[name]].to(local.device)
            local.copy_(new if keep == 0 else torch.lerp(new, local.to(torch.float32), keep))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a vector like `flat`: views, cut as the parameters are."""
        return {
            name: parameter.like(flat[self._parts[name]])
            if isinstance(parameter, RaggedTensor)
            else flat[self._parts[name]].view(parameter.shape)
            for name, parameter in self.parameters.items()
        }

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """(key, parameter's name or "", value) of the outer optimizer's state; vectors by parameter."""
        for key, value in self.optimizer.state.get(self.flat, {}).items():
            if isinstance(value, Tensor) and value.shape == self.flat.shape:
                yield from ((key, name, part) for name, part in self.named(value).items())
            elif value is not None:
                yield key, "", value

    def have_state(self) -> None:
        """Let the outer optimizer make its state, so that a checkpoint can be read into it."""
        if self.optimizer.state.get(self.flat):
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        before = self.flat.detach().clone()
        self.step(torch.zeros_like(before))
        with torch.no_grad():
            self.flat.copy_(before)
            for value in self.optimizer.state.get(self.flat, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()  # that step was none
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def local_of(parameter: Tensor) -> Tensor:
    """This rank's elements, flat, a view."""
    if isinstance(parameter, RaggedTensor):
        return parameter.to_local()
    return parameter.detach().view(-1)
