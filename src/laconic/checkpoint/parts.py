"""What a checkpoint calls things: the names and shapes of the unsliced model, whatever slices a run trains.

[Note: The layout of a checkpoint]
Under `model.` and `optim.` a checkpoint is that of one unsliced model, which any other run can go on from: the outer
parameters, where islands take local steps; parts of sliced parameters joined; and of inner optimizer state what the
first island has that trains a coordinate, or zero where none does. State that is not element by element (scales of
8-bit blocks, preconditioners) cannot be joined: it is under the names of the parts, for runs with the same slices.
What islands need beyond that to go on to the same bits is under `islands.I.`, each island's own, by parts: inner
parameters, inner optimizer state that is not the first's, what the codec lost and what is in flight. What they share is
under `outer.`: outer optimizer state, the mean that is in flight, and outer parameters in fp32 if the model's are not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.checkpoint.storage import Entry
from laconic.comm.agreement import RankGroup
from laconic.ragged.joined import JoinedTensor, joined
from laconic.ragged.tensor import RaggedTensor

_PART = re.compile(r"_(slice\d+|shared)$")

OptimizerStates = dict[str, dict[str, Any]]
"""Of an optimizer: by parameter, then by key."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Who trains what, as one island sees it."""

    slices: int = 1
    held: tuple[int, ...] = (0,)
    """The slice of every island; one island without local steps."""
    digest: str = ""
    """Of what is sliced."""
    island: int = 0

    @staticmethod
    def of(model: nn.Module, ranks: RankGroup, *, island: int, islands: int) -> Assignment:
        """Collective, if there are islands."""
        places, parameters = state.places(model), state.named_parameters(model)
        trained = {s.slice_of(index) for name, (_, s, index) in places.items() if parameters[name].requires_grad}
        own = next((slice for slice in trained if slice is not None), 0)
        held = dict(ranks.gather((island, own))) if islands > 1 else {island: own}
        wholes = sorted({whole for whole, _, _ in places.values()})
        return Assignment(
            slices=next((sliced.slices for _, sliced, _ in places.values()), 1),
            held=tuple(held[index] for index in range(islands)),
            digest=hashlib.sha256(" ".join(wholes).encode()).hexdigest() if wholes else "",
            island=island,
        )

    @staticmethod
    def saved(told: Mapping[str, Any] | None) -> Assignment:
        """As `to_json` told it; of one island without slices, if it did not."""
        if told is None:
            return Assignment()
        return Assignment(slices=told["slices"], held=tuple(told["held"]), digest=told["digest"])

    def to_json(self) -> dict[str, Any]:
        """What is the same on all islands."""
        return {"slices": self.slices, "held": list(self.held), "digest": self.digest}

    def first(self, slice: int | None) -> int:
        """The first island that trains a slice; 0 for what all train, and for what nobody does."""
        return self.held.index(slice) if slice in self.held else 0

    def slice_of(self, island: int) -> int | None:
        """What an island trains; None if there is no such island."""
        return self.held[island] if island < len(self.held) else None

    def has_slices_of(self, other: Assignment) -> bool:
        """Whether the same is sliced in the same way."""
        return (self.slices, self.digest) == (other.slices, other.digest)


def optimizer_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, assignment: Assignment, ranks: RankGroup
) -> tuple[OptimizerStates, OptimizerStates]:
    """What this island writes of the optimizer's state: for everybody, and its own. Collective for a sliced model."""
    places = state.places(model)
    parameters = state.named_parameters(model)
    states = state.optimizer_state(model, optimizer)
    apart = _kept_apart(states, model, optimizer, ranks) if places else frozenset()
    common: OptimizerStates = {}
    own: OptimizerStates = {}
    vectors: dict[str, OptimizerStates] = {}  # by whole, key and part
    for name, entries in states.items():
        whole, sliced, index = places.get(name, (name, None, 0))
        is_first = assignment.first(sliced.slice_of(index) if sliced else None) == assignment.island
        if sliced is None or whole in apart:
            (common if is_first else own)[name] = entries
            continue
        numbers = {key: value for key, value in entries.items() if not _is_like(value, parameters[name])}
        own[name] = numbers if is_first else entries
        if assignment.island == 0:
            common[whole] = numbers | common.get(whole, {})
        for key, value in entries.items():
            if is_first and key not in numbers:
                vectors.setdefault(whole, {}).setdefault(key, {})[name] = value
    for name, (whole, sliced, index) in places.items():
        slice = sliced.slice_of(index)
        if assignment.island == 0 and slice is not None and slice not in assignment.held:
            for by_part in vectors.get(whole, {}).values():
                like = next(iter(by_part.values()))
                by_part[name] = torch.zeros_like(parameters[name], dtype=like.dtype, requires_grad=False)
    for whole, by_key in vectors.items():
        entry = common.setdefault(whole, {})
        for key, by_part in by_key.items():
            entry |= {key: joined(by_part, places)[whole]}
    return common, own


def _kept_apart(
    states: OptimizerStates, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup
) -> frozenset[str]:
    """The sliced parameters whose state cannot be joined, or is not complete on every island."""
    places = state.places(model)
    mine = set()
    for name, parameter in state.optimized(model, optimizer).items():
        if name in places:
            values = [value for value in states.get(name, {}).values() if isinstance(value, Tensor) and value.ndim]
            if not values or not all(_is_like(value, parameter) for value in values):
                mine.add(places[name][0])
    return frozenset(name for names in ranks.gather(sorted(mine)) for name in names)


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether it has an entry for each of the parameter's, in the same place."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.ndim == 0:
        return False
    if isinstance(parameter, RaggedTensor):
        return isinstance(value, RaggedTensor) and value.spec == parameter.spec
    return not isinstance(value, RaggedTensor)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where a tensor of an optimizer's state is in a folder."""

    key: str
    entry: Entry
    """Of what this run has."""
    is_joined: bool = False
    """The folder has it for the whole parameter."""


Locations = dict[str, dict[str, Located]]
"""By parameter, as this run has them, and key."""


def locate(
    names: Mapping[str, Tensor],
    places: state.Places,
    common: Mapping[str, Mapping[str, Entry]],
    own: Mapping[str, Mapping[str, Entry]],
    *,
    common_prefix: str,
    own_prefix: str,
    has_same_slices: bool,
) -> Locations:
    """Find state for parameters; what an island wrote of its own goes before what is for everybody."""
    found: Locations = {}
    for name, parameter in names.items():
        whole, sliced, _ = places.get(name, (name, None, 0))
        here: dict[str, Located] = {}
        if sliced is not None and whole in common:
            for key, entry in common[whole].items():
                is_joined = entry.shape == sliced.shape
                shown = Entry(tuple(parameter.shape), entry.dtype) if is_joined else entry
                here[key] = Located(key=f"{common_prefix}{whole}.{key}", entry=shown, is_joined=is_joined)
        elif sliced is None or has_same_slices:
            here = {
                key: Located(key=f"{common_prefix}{name}.{key}", entry=entry)
                for key, entry in common.get(name, {}).items()
            }
        for key, entry in own.get(name, {}).items():
            here[key] = Located(key=f"{own_prefix}{name}.{key}", entry=entry)
        if here:
            found[name] = here
    return found


def targets(
    room: Mapping[str, Mapping[str, Tensor]], locations: Locations, places: state.Places
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """What to fill, by keys of the folder; and copies to make then, (to, from), of a number that parts share."""
    filled: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor | None]] = {}
    copies = []
    for name, tensors in room.items():
        for key, tensor in tensors.items():
            location = locations[name][key]
            if location.is_joined:
                _, sliced, index = places[name]
                parts.setdefault(location.key, [None] * len(sliced.part_names))[index] = tensor
                filled[location.key] = JoinedTensor(sliced, parts[location.key])
            elif location.key in filled:
                copies.append((tensor, filled[location.key]))
            else:
                filled[location.key] = tensor
    return filled, copies


def whole_name(name: str, places: state.Places) -> str:
    """Of a part; of another parameter, its own."""
    return places[name][0] if name in places else name


def is_of_slices(name: str, parameters: Collection[str], places: state.Places) -> bool:
    """Whether a name of the folder is about a parameter that is sliced here, or was there."""
    if name in parameters and name not in places:
        return False
    wholes = {whole_name(parameter, places) for parameter in parameters}
    return name in {whole for whole, _, _ in places.values()} or _PART.sub("", name) in wholes - {name}
