"""The outer parameters of a fragment, in host memory, and the outer optimizer that moves them.

Each coordinate of a pseudo-gradient is averaged over the islands that train it, not over all islands. A slice may lose
all its holders. Its parameters and their outer momentum then stay as they are until an island trains the slice again.

[Note: Outer parameter groups]
A mean over one holder is noisier than a mean over all islands, and holders of different slices do not see each other's
updates. So slices want other outer steps than parameters that all islands train. The outer optimizer of a fragment gets
torch's parameter groups: one for each number of holders, as {"params": [...], "holders": m, "islands": I}, to which a
function that makes an outer optimizer may add "lr" and whatever else the optimizer takes. A group is sliced if m < I.

[Note: Outer steps of slices]
Parameters that all islands train have DiLoCo's learning rate and momentum. With m of I holders, `OuterSGD` takes the
same learning rate, and the momentum times the square root of m / I, unless the user names others: 0.71, 0.5 and 0.35 of
it for 1/2, 1/4 and 1/8 of the islands. A drift that stays the same for many syncs then moves a slice by lr / (1 - that
momentum): with 0.7 and 0.9 by 1.9, 1.3 and 1.0 of itself, where what all islands train moves by 7. We have measured it:
benchmarks/local_steps/slices.py tries other pairs beside it (row `slices-outer`).

A fragment has one outer parameter for all that is not sliced, and one for each slice. They are views of one buffer, in
an order that does not depend on the holders. When islands come or go, an outer parameter may change its group, but its
state stays what it was. Without slices there is one group with one outer parameter.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.cluster import Cluster
from laconic.islands.all_reduce import sum_over_islands
from laconic.ragged.parts import slice_of_parameters
from laconic.ragged.tensor import RaggedTensor


def check_slices(holders: Sequence[int], *, may_join: bool, numel: Sequence[int] | None = None) -> None:
    """Refuse slices that no island trains, or warn of them in one line where islands may join.

    Args:
        holders: the number of islands that train each slice.
        may_join: whether islands may join later. They take the slices that fewest islands train.
        numel: the number of weights in each slice, if the model is known.

    Raises:
        ValueError: a slice has no holder, and no island may join.
    """
    idle = [index for index, count in enumerate(holders) if not count]
    if not idle:
        return
    weights = "" if numel is None else f", so {sum(numel[index] for index in idle):,} weights never change"
    trained = len(holders) - len(idle)
    problem = f"no island trains slice {', '.join(map(str, idle))} of {len(holders)}{weights}"
    if not may_join:
        raise ValueError(
            f"{problem}; use at most as many slices as islands, and give every slice to an island "
            f"({trained} of the slices have one)"
        )
    warnings.warn(f"{problem} until an island joins", stacklevel=3)


class Holders:
    """The islands that train each part of a sliced parameter, counted once. All islands train all other parameters."""

    def __init__(self, model: nn.Module, cluster: Cluster) -> None:
        """Count the holders of each part. Collective over islands."""
        self.num_islands = cluster.num_islands
        slices = slice_of_parameters(model)
        self._slices = {name: index for name, index in slices.items() if index is not None}
        parts = {name: p for name, p in model.named_parameters() if name in self._slices}
        trained = {name: part.requires_grad for name, part in parts.items()}
        self._numel = {name: part.numel() for name, part in parts.items()}
        self._holders = dict(zip(trained, sum_over_islands(cluster, list(trained.values())), strict=True))

    def is_synced(self, name: str, parameter: nn.Parameter) -> bool:
        """True if an island may train the parameter."""
        return parameter.requires_grad or name in self._holders

    def check(self, *, may_join: bool) -> None:
        """See `check_slices`."""
        num_slices = max(self._slices.values(), default=-1) + 1
        numel: Counter[int] = Counter()
        holders = dict.fromkeys(range(num_slices), self.num_islands)
        for name, index in self._slices.items():
            numel[index] += self._numel[name]
            holders[index] = min(holders[index], self._holders[name])
        check_slices(list(holders.values()), may_join=may_join, numel=[numel[index] for index in holders])

    def order(self, name: str) -> int:
        """Return the slice of a parameter, from 0; -1 if it is in no slice."""
        return self._slices.get(name, -1)

    def count(self, name: str) -> int:
        """Return the number of islands that train the parameter."""
        return self._holders.get(name, self.num_islands)


MakeOuter = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an outer optimizer of parameter groups: [Note: Outer parameter groups]."""


@dataclass(frozen=True, kw_only=True)
class _Section:
    """An outer parameter: a view of a run of the fragment's buffer."""

    parameter: nn.Parameter
    run: slice
    names: list[str]
    """The model's parameters of which it is made, in the order of the buffer."""


class OuterFragment:
    """One fragment's outer parameters: a flat fp32 buffer on the host, with this rank's part of every parameter.

    Outer parameters are the result of the last sync. Pseudo-gradients are differences from them, even if `mixing` lets
    the inner parameters start elsewhere.
    """

    def __init__(self, parameters: Mapping[str, Tensor], make_outer: MakeOuter, holders: Holders) -> None:
        """Copy the inner parameters of one fragment, of which `holders` knows the islands that train them."""
        self.parameters = dict(sorted(parameters.items(), key=lambda item: holders.order(item[0])))
        """The inner parameters by name: first those that all islands train, then slice by slice."""
        self._parts: dict[str, slice] = {}
        begin = 0
        for name, parameter in self.parameters.items():
            end = begin + flat_local(parameter).numel()
            self._parts[name] = slice(begin, end)
            begin = end
        self.flat = self.copy_inner()
        """The outer parameters, (numel,)."""
        counts = {name: holders.count(name) for name in self.parameters}
        self._unheld = {name for name, count in counts.items() if count == 0}
        self.divisor: Tensor | None = None
        """The number of islands that train each coordinate, (numel,); None if all islands train all."""
        if {*counts.values()} - {holders.num_islands}:
            self.divisor = torch.empty_like(self.flat)
            for name, part in self._parts.items():
                self.divisor[part] = counts[name]
        self._frozen = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        self._sections = self._cut(holders)
        self.optimizer = make_outer(self._groups(holders))

    def _cut(self, holders: Holders) -> list[_Section]:
        """Cut the buffer into one outer parameter, a view, for the whole parameters and one for each slice."""
        names: dict[int, list[str]] = {}
        for name in self.parameters:
            names.setdefault(holders.order(name), []).append(name)
        runs = [(slice(self._parts[each[0]].start, self._parts[each[-1]].stop), each) for each in names.values()]
        return [_Section(parameter=nn.Parameter(self.flat[run]), run=run, names=each) for run, each in runs]

    def _groups(self, holders: Holders) -> list[dict[str, Any]]:
        """Group the outer parameters by the number of their holders, most holders first."""
        groups: dict[int, list[nn.Parameter]] = {}
        for section in self._sections:
            groups.setdefault(max(map(holders.count, section.names)), []).append(section.parameter)
        return [
            {"params": groups[count], "holders": count, "islands": holders.num_islands}
            for count in sorted(groups, reverse=True)
        ]

    def copy_inner(self) -> Tensor:
        """Copy the present inner parameters: (numel,), fp32, on the host."""
        parts = [flat_local(parameter).to("cpu", torch.float32) for parameter in self.parameters.values()]
        return torch.cat(parts) if parts else torch.empty(0)

    def pseudo_gradient(self) -> Tensor:
        """Return outer minus inner parameters, (numel,); zero where this island does not train."""
        difference = self.flat - self.copy_inner()
        for name in self._frozen:
            difference[self._parts[name]] = 0
        return difference

    def step(self, mean: Tensor) -> None:
        """Step along the mean pseudo-gradient, (numel,). Coordinates that no island trains keep value and momentum."""
        unheld = [self.flat[self._parts[name]] for name in self._unheld]
        unheld += [values for _, name, values in self._parts_of_state() if name in self._unheld]
        kept = [(values, values.clone()) for values in unheld]
        for section in self._sections:
            section.parameter.grad = mean[section.run]
        self.optimizer.step()
        for section in self._sections:
            section.parameter.grad = None
        for values, before in kept:
            values.copy_(before)

    def _parts_of_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (key, parameter's name, its part) of each vector of the outer optimizer's state."""
        for section in self._sections:
            for key, value in self.optimizer.state.get(section.parameter, {}).items():
                for name in section.names if _is_like(value, section.parameter) else ():
                    part, begin = self._parts[name], section.run.start
                    yield key, name, value[part.start - begin : part.stop - begin]

    def vectors(self) -> list[Tensor]:
        """Return the outer parameters and all tensors of the outer optimizer's state, in an order all islands share."""
        states = [self.optimizer.state.get(section.parameter, {}) for section in self._sections]
        return [self.flat, *(v for state in states for _, v in sorted(state.items()) if isinstance(v, Tensor))]

    def kept_tensors(self) -> list[Tensor]:
        """Return all tensors that rest in host memory between syncs."""
        return self.vectors() if self.divisor is None else [*self.vectors(), self.divisor]

    def write_inner(self, values: Tensor, keep: float = 0.0) -> None:
        """Set the inner parameters to keep * inner + (1 - keep) * values, with values of shape (numel,)."""
        for name, parameter in self.parameters.items():
            local = flat_local(parameter)
            new = values[self._parts[name]].to(local.device)
            local.copy_(new if keep == 0 else torch.lerp(new, local.to(torch.float32), keep))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a vector like `flat`, (numel,), into one view for each parameter, sharded as the parameter is."""
        return {name: self._as_parameter(name, flat[part]) for name, part in self._parts.items()}

    def _as_parameter(self, name: str, values: Tensor) -> Tensor:
        """View this rank's values of a parameter, (local numel,), as the parameter is shaped and sharded."""
        parameter = self.parameters[name]
        return parameter.like(values) if isinstance(parameter, RaggedTensor) else values.view(parameter.shape)

    def optimizer_state(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (key, parameter's name, value) of the outer optimizer's state; for numbers the name is empty.

        A number, such as a count of steps, is the same for all outer parameters, and comes once.
        """
        yield from ((key, name, self._as_parameter(name, part)) for key, name, part in self._parts_of_state())
        numbers: dict[str, Any] = {}
        for section in self._sections:
            state = self.optimizer.state.get(section.parameter, {})
            rest = {key: value for key, value in state.items() if not _is_like(value, section.parameter)}
            numbers |= {key: value for key, value in rest.items() if value is not None}
        yield from ((key, "", value) for key, value in numbers.items())

    def set_number(self, key: str, value: Any) -> None:
        """Set a number of the outer optimizer's state, for all outer parameters."""
        for section in self._sections:
            state = self.optimizer.state.get(section.parameter, {})
            if isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            elif key in state:
                state[key] = value

    def create_state(self) -> None:
        """Create the outer optimizer's state, all zero, so that a checkpoint can be read into it."""
        if any(self.optimizer.state.get(section.parameter) for section in self._sections):
            return
        before = self.flat.clone()
        with torch.enable_grad():
            self.step(torch.zeros_like(before))
        with torch.no_grad():
            self.flat.copy_(before)
            for vector in self.vectors()[1:]:
                vector.zero_()  # as before the first step


def layout_digest(fragments: Sequence[OuterFragment], *kinds: str) -> str:
    """A digest of the parameters of fragments, with their shapes, and of what else must be equal where there is any."""
    shapes = [[[name, list(each.shape)] for name, each in fragment.parameters.items()] for fragment in fragments]
    return hashlib.sha256(json.dumps([shapes, kinds] if kinds else shapes).encode()).hexdigest()


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def flat_local(parameter: Tensor) -> Tensor:
    """Return this rank's elements of a parameter, flat: a view."""
    if isinstance(parameter, RaggedTensor):
        return parameter.to_local()
    return parameter.detach().view(-1)
