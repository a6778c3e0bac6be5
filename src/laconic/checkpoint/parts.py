"""Optimizer state of sliced parameters, under the names of the unsliced model.

[Note: The layout of a checkpoint]
The keys under `model.` and `optim.` are those of one unsliced model, from which any other run can go on. With local
steps its parameters are the outer parameters. Parts of sliced parameters are joined. The optimizer state of a slice is
that of the first island that trains it; for a slice that no island trains it is zero. State that does not have one
element for each element of the parameter (scales of 8-bit blocks, preconditioners) cannot be joined. It is under the
names of the parts, for runs with the same slices.
To go on to the same bits, islands need more tensors. An island's own tensors are under `islands.I.`, by parts: its
inner parameters, its inner optimizer state unless that is under `optim.`, the residuals of error feedback, and the
pseudo-gradient in flight. Tensors that are equal on all islands are under `outer.`: the outer optimizer's state, the
mean of the fragment in flight, and outer parameters in fp32 if the model has another dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.checkpoint.island_slices import IslandSlices
from laconic.comm.agreement import RankGroup
from laconic.ragged.parts import joined
from laconic.ragged.tensor import RaggedTensor

OptimizerStates = dict[str, dict[str, Any]]
"""The state of an optimizer: by parameter, then by key."""


def optimizer_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, islands: IslandSlices, ranks: RankGroup
) -> tuple[OptimizerStates, OptimizerStates]:
    """Return the state that this island writes under `optim.`, and under `islands.I.`. Collective with slices."""
    places, parameters = state.places(model), state.named_parameters(model)
    states = state.optimizer_state(model, optimizer)
    not_joined = _not_joined(states, model, optimizer, ranks) if places else frozenset()
    common: OptimizerStates = {}
    own: OptimizerStates = {}
    vectors: dict[tuple[str, str], dict[str, Tensor]] = {}  # by whole and key, then by part
    for name, entries in states.items():
        whole, sliced, index = places.get(name, (name, None, 0))
        is_first = islands.is_first(sliced.slice_of(index) if sliced else None)
        if sliced is None or whole in not_joined:
            (common if is_first else own)[name] = entries
            continue
        numbers = {key: value for key, value in entries.items() if not _is_like(value, parameters[name])}
        own[name] = numbers if is_first else entries
        if islands.island == 0:
            common[whole] = numbers | common.get(whole, {})
        for key, value in entries.items():
            if is_first and key not in numbers:
                vectors.setdefault((whole, key), {})[name] = value
    untrained: dict[str, list[str]] = {}
    for name, (whole, sliced, index) in places.items():
        if islands.island == 0 and sliced.slice_of(index) not in (None, *islands.held):
            untrained.setdefault(whole, []).append(name)
    for (whole, key), by_part in vectors.items():
        dtype = next(iter(by_part.values())).dtype
        for name in untrained.get(whole, ()):
            by_part[name] = torch.zeros_like(parameters[name], dtype=dtype, requires_grad=False)
        common.setdefault(whole, {})[key] = joined(by_part, places)[whole]
    return common, own


def _not_joined(
    states: OptimizerStates, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup
) -> frozenset[str]:
    """Return the sliced parameters whose state cannot be joined, or is incomplete on an island."""
    places = state.places(model)
    names = set()
    for name, parameter in state.optimized(model, optimizer).items():
        if name in places:
            values = [value for value in states.get(name, {}).values() if isinstance(value, Tensor) and value.ndim]
            if not values or not all(_is_like(value, parameter) for value in values):
                names.add(places[name][0])
    return frozenset(name for of_rank in ranks.gather(sorted(names)) for name in of_rank)


def _is_like(value: Any, parameter: Tensor) -> bool:
    """True if a value has one element for each element of the parameter, on the same rank."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.ndim == 0:
        return False
    if isinstance(parameter, RaggedTensor):
        return isinstance(value, RaggedTensor) and value.spec == parameter.spec
    return not isinstance(value, RaggedTensor)
