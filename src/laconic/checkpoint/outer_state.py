"""The tensors that local steps add to a checkpoint: [Note: The layout of a checkpoint] in checkpoint/parts.py."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.checkpoint.fill import Source
from laconic.checkpoint.keys import ISLANDS, OUTER
from laconic.checkpoint.parts import OptimizerStates
from laconic.comm.agreement import RankGroup
from laconic.islands.local_steps import LocalSteps
from laconic.ragged.parts import joined

_IN_FLIGHT = ("mean", "drift", "sent")
"""The tensors of a fragment in flight. The mean is equal on all islands."""
_COUNTS = ("steps", "rounds", "since")
"""The counts of `Position`. Without `membership`, the last two follow from the steps."""
_TOKENS = "tokens"
"""What each fragment's next pseudo-gradient comes from: in a checkpoint by island, in `state_dict` of this island."""
_Vectors = dict[str, dict[str, Tensor]]
"""Tensors by kind (outer, lost, mean, ...) or by the outer optimizer's key, and then by parameter."""


def tree(
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
    counts = {key: agreed[key] for key in _COUNTS if key in agreed}
    return model_tensors, rest, {"numbers": numbers, **counts, _TOKENS: [tokens[each] for each in sorted(tokens)]}


def own_optimizer_prefix(island: int) -> str:
    """Return the prefix before the parameters' names in an island's own optimizer state."""
    return f"{ISLANDS}.{island}.optimizer."


@torch.no_grad()
def restore(
    source: Source,
    model: nn.Module,
    local_steps: LocalSteps,
    progress: Mapping[str, Any] | None,
    *,
    step: int,
    island: int | None,
) -> None:
    """Restore local steps, once the model holds the outer parameters. Collective.

    `progress` has `tree`'s values for the sidecar; None if the checkpoint, of step `step`, has no islands. The ranks go
    on from the inner parameters of `island`; None: the outer parameters. Raises StorageError if a rank could not read.
    """
    for fragment in local_steps.fragments:
        fragment.create_state()
    agreed = {k: value for k, value in local_steps.state_dict().items() if k.partition(".")[0] not in _IN_FLIGHT}
    prefix = f"{ISLANDS}.{island}"
    counts = {key: int(progress[key]) for key in _COUNTS if key in progress} if progress else {"steps": step}
    if island is not None:
        agreed |= _in_flight(source, local_steps, counts, prefix)
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
    others = {key: value for key, value in agreed.items() if key not in (*_COUNTS, _TOKENS)}
    tokens = progress.get(_TOKENS) if progress and island is not None else None
    own_tokens = {} if tokens is None else {_TOKENS: tokens[island]}
    local_steps.load_state_dict({**others, **known, **counts, **own_tokens})


def _in_flight(source: Source, local_steps: LocalSteps, counts: Mapping[str, int], prefix: str) -> dict[str, Tensor]:
    """Make room for the fragment in flight; none unless this run's schedule has the same fragment in flight then."""
    schedule = local_steps.schedule
    index = schedule.in_flight(replace(schedule.position(counts["steps"]), **counts))
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
        elif kind not in (*_COUNTS, _TOKENS):
            vectors[kind][state.strip(rest)] = value
    return vectors, optimizer, numbers


def _without_empty(sections: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in sections.items() if section}
