"""The parts of a checkpoint that only islands and slices have: slices, the optimizer's state by parts, local steps.

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

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.fill import Source
from laconic.checkpoint.keys import ISLANDS, OUTER
from laconic.comm.agreement import RankGroup
from laconic.islands.local_steps import LocalSteps
from laconic.ragged.parts import joined
from laconic.ragged.tensor import RaggedTensor


@dataclass(frozen=True, kw_only=True)
class IslandSlices:
    """The slices of all islands."""

    num_slices: int = 1
    held: tuple[int, ...] = (0,)
    """The slice of every island. Without local steps there is one island."""
    digest: str = ""
    """A hash of the names of the sliced parameters; empty if there are none."""
    island: int = 0
    """The index of this rank's island."""
    has_islands: bool = False
    """True with local steps."""

    @staticmethod
    def of(model: nn.Module, local_steps: LocalSteps | None, ranks: RankGroup) -> IslandSlices:
        """Find the slices of a run. Collective, if there are several islands."""
        places, parameters = state.places(model), state.named_parameters(model)
        island = local_steps.cluster.island_rank if local_steps else 0
        num_islands = local_steps.cluster.num_islands if local_steps else 1
        trained = {s.slice_of(index) for name, (_, s, index) in places.items() if parameters[name].requires_grad}
        own = next((index for index in trained if index is not None), 0)
        everyone: list[Any] = ranks.gather([island, own]) if num_islands > 1 else [[island, own]]
        held = dict(everyone)
        wholes = sorted({whole for whole, _, _ in places.values()})
        return IslandSlices(
            num_slices=next((sliced.num_slices for _, sliced, _ in places.values()), 1),
            held=tuple(held[index] for index in range(num_islands)),
            digest=hashlib.sha256(" ".join(wholes).encode()).hexdigest() if wholes else "",
            island=island,
            has_islands=local_steps is not None,
        )

    @staticmethod
    def saved(values: Mapping[str, Any] | None) -> IslandSlices:
        """Make the slices of a checkpoint from the values of `to_json`; None stands for one island without slices."""
        if values is None:
            return IslandSlices()
        held = tuple(values["held"])
        return IslandSlices(num_slices=values["slices"], held=held, digest=values["digest"], has_islands=True)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are equal on all islands."""
        return {"slices": self.num_slices, "held": list(self.held), "digest": self.digest}

    def is_first(self, slice_index: int | None) -> bool:
        """True on the first island that trains a slice. For a slice that all or no islands train, this is island 0."""
        first = self.held.index(slice_index) if slice_index in self.held else 0
        return first == self.island

    def has_slices_of(self, other: IslandSlices) -> bool:
        """True if the same parameters are cut into as many slices."""
        return (self.num_slices, self.digest) == (other.num_slices, other.digest)

    def has_own_state_in(self, saved: IslandSlices) -> bool:
        """True if a checkpoint has inner optimizer state of this island, for the slice that the island trains."""
        own = slice(self.island, self.island + 1)
        both = self.has_islands and saved.has_islands
        return both and self.has_slices_of(saved) and self.held[own] == saved.held[own]

    def refuse_other_layers(self, saved: IslandSlices) -> None:
        """Refuse a checkpoint of as many slices of other layers: a changed default must not change a run unseen.

        Raises:
            CheckpointError: other layers are sliced.
        """
        if self.num_slices == saved.num_slices and self.digest != saved.digest:
            raise CheckpointError(
                "the checkpoint was saved by islands that slice other layers than this run does, into as many slices "
                f"({self.num_slices}). Earlier releases sliced MLPs and attention where nothing was named, and this "
                'one slices MLPs alone: set partial_updates(include=["mlp", "attention"]) (in a job '
                "sync.slice_include) to go on as before. To slice other layers from now on, load with strict=False, or "
                "start a new run from its export"
            )

    def difference(self, saved: IslandSlices) -> str:
        """Say why this run's islands cannot go on to the same bits from a checkpoint; empty if they can."""
        if not saved.has_islands and not self.has_islands:
            return ""
        if not saved.has_islands:
            return "was saved without islands: all start from its parameters"
        if not self.has_islands:
            return f"was saved by {len(saved.held)} islands: this run goes on from what they agreed on"
        if saved.held == self.held and saved.has_slices_of(self):
            return ""
        if len(saved.held) != len(self.held):
            why = f"was saved by {len(saved.held)} islands, this run has {len(self.held)}"
        elif self.num_slices == saved.num_slices and self.digest != saved.digest:
            why = "was saved by islands that slice other layers"
        else:
            why = f"was saved by islands that train slices {saved._listing()}, this run's train {self._listing()}"
        return f"{why}: every island starts from the outer parameters, with the inner optimizer state that fits"

    def _listing(self) -> str:
        return f"{', '.join(map(str, self.held))} of {self.num_slices}"


_IN_FLIGHT = ("mean", "drift", "sent")
"""The tensors of a fragment in flight. The mean is equal on all islands."""
_TOKENS = "tokens"
"""The tensors from which each fragment makes its next pseudo-gradient. A checkpoint has those of all islands, a
`state_dict` those of this island."""
_Vectors = dict[str, dict[str, Tensor]]
"""Tensors by kind (outer, lost, mean, ...) or by the outer optimizer's key, and then by parameter."""


def local_steps_tree(
    model: nn.Module,
    local_steps: LocalSteps,
    island: int,
    tensors: dict[str, Tensor],
    own_states: OptimizerStates,
    ranks: RankGroup,
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Collect the tensors that one island writes. Waits for the mean of the fragment in flight. Collective.

    `tensors` are the inner model's; `own_states` is the island's own inner optimizer state. Returns the model's tensors
    with outer parameters in place of inner ones, the trees under `outer` and `islands`, and values for the sidecar.
    """
    agreed = local_steps.state_dict()
    vectors, optimizer, numbers = _sorted(agreed)
    places, parameters, outer = state.places(model), state.named_parameters(model), vectors["outer"]
    model_tensors = {name: outer[name].to(t.dtype) if name in outer else t for name, t in tensors.items()}
    outer_optimizer: _Vectors = {}
    for key, by_name in optimizer.items():
        for name, vector in joined(by_name, places).items():
            outer_optimizer.setdefault(name, {})[key] = vector
    shared = {
        "parameters": joined({name: t for name, t in outer.items() if parameters[name].dtype != t.dtype}, places),
        "mean": joined(vectors["mean"], places),
        "optimizer": outer_optimizer,
    }
    own = {
        # Without mixing, the parameters that an island does not train equal the outer ones.
        "parameters": {n: tensors[n] for n in outer if parameters[n].requires_grad or local_steps.schedule.mixing},
        "optimizer": own_states,
        **{kind: vectors[kind] for kind in ("lost", "drift", "sent")},
    }
    rest = {OUTER: _without_empty(shared), ISLANDS: {str(island): _without_empty(own)}}
    told: list[Any] = ranks.gather([island, agreed[_TOKENS]])
    tokens = dict(told)
    own_tokens = [tokens[each] for each in sorted(tokens)]
    return model_tensors, rest, {"numbers": numbers, "steps": agreed["steps"], _TOKENS: own_tokens}


def own_optimizer_prefix(island: int) -> str:
    """Return the prefix before the parameters' names in an island's own optimizer state."""
    return f"{ISLANDS}.{island}.optimizer."


@torch.no_grad()
def restore_local_steps(
    source: Source,
    model: nn.Module,
    local_steps: LocalSteps,
    progress: Mapping[str, Any] | None,
    *,
    step: int,
    island: int | None,
) -> None:
    """Restore local steps, once the model holds the outer parameters. Collective.

    `progress` has the sidecar's values of `local_steps_tree`; None if the checkpoint, of step `step`, has no islands.
    The ranks go on from the inner parameters of `island`, or from the outer ones if it is None. StorageError is raised
    if a rank could not read.
    """
    for fragment in local_steps.fragments:
        fragment.create_state()
    agreed = {k: value for k, value in local_steps.state_dict().items() if k.partition(".")[0] not in _IN_FLIGHT}
    prefix = f"{ISLANDS}.{island}"
    steps = int(progress["steps"]) if progress else step
    if island is not None:
        agreed |= _in_flight(source, local_steps, steps, prefix)
    vectors, optimizer, _ = _sorted(agreed)
    places, parameters = state.places(model), state.named_parameters(model)
    for name, outer in vectors["outer"].items():
        outer.copy_(parameters[name].detach().to(outer.device, outer.dtype))
    targets = {f"{OUTER}.parameters.{name}": tensor for name, tensor in joined(vectors["outer"], places).items()}
    targets |= {f"{OUTER}.mean.{name}": tensor for name, tensor in joined(vectors["mean"], places).items()}
    for key, by_name in optimizer.items():
        targets |= {f"{OUTER}.optimizer.{name}.{key}": tensor for name, tensor in joined(by_name, places).items()}
    for by_name in (*optimizer.values(), vectors["lost"]):
        for vector in by_name.values():
            vector.zero_()
    if island is not None:
        targets |= {f"{prefix}.parameters.{name}": parameters[name].detach() for name in vectors["outer"]}
        for kind in ("lost", "drift", "sent"):
            targets |= {f"{prefix}.{kind}.{name}": tensor for name, tensor in vectors[kind].items()}
    source.read({key: tensor for key, tensor in targets.items() if key in source.entries})
    numbers = {f"outer_optimizer.{key}": number for key, number in (progress["numbers"] if progress else {}).items()}
    known = {key: number for key, number in numbers.items() if key in agreed}
    others = {key: value for key, value in agreed.items() if key not in ("steps", _TOKENS)}
    tokens = progress.get(_TOKENS) if progress and island is not None else None
    own_tokens = {} if tokens is None else {_TOKENS: tokens[island]}
    local_steps.load_state_dict({**others, **known, "steps": steps, **own_tokens})


def _in_flight(source: Source, local_steps: LocalSteps, steps: int, prefix: str) -> dict[str, Tensor]:
    """Make room for the fragment in flight; none unless this run's schedule has the same fragment in flight then."""
    index = local_steps.schedule.in_flight(steps)
    if index is None:
        return {}
    fragment = local_steps.fragments[index]
    saved = {key.removeprefix(f"{prefix}.drift.") for key in source.entries if key.startswith(f"{prefix}.drift.")}
    if saved != {state.strip(name) for name in fragment.parameters}:
        return {}
    return {
        f"{kind}.{name}": part
        for kind in _IN_FLIGHT
        for name, part in fragment.named(torch.zeros_like(fragment.flat)).items()
    }


def _sorted(agreed: Mapping[str, Any]) -> tuple[_Vectors, _Vectors, dict[str, Any]]:
    """Sort `LocalSteps.state_dict` into vectors, the outer optimizer's vectors, and the outer optimizer's numbers."""
    vectors: _Vectors = defaultdict(dict)
    optimizer: _Vectors = defaultdict(dict)
    numbers = {}
    for full_key, value in agreed.items():
        kind, _, rest = full_key.partition(".")
        name, _, key = rest.rpartition(".")
        if kind == "outer_optimizer" and f"outer.{name}" in agreed:
            optimizer[key][state.strip(name)] = value
        elif kind == "outer_optimizer":
            numbers[rest] = value
        elif kind not in ("steps", _TOKENS):
            vectors[kind][state.strip(rest)] = value
    return vectors, optimizer, numbers


def _without_empty(sections: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in sections.items() if section}


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
