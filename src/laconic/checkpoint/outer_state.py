"""What local steps add to a checkpoint: [Note: The layout of a checkpoint] in slices.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.checkpoint.fill import Source
from laconic.checkpoint.keys import ISLANDS, OUTER
from laconic.checkpoint.parts import Assignment, OptimizerStates
from laconic.islands.local_steps import LocalSteps
from laconic.ragged.joined import joined

_PARAMETERS, _OPTIMIZER, _MEAN, _LOST = "parameters", "optimizer", "mean", "lost"
_SENT = ("drift", "sent")


class Agreement:
    """`LocalSteps.state_dict`, sorted: by kind, and by names of the model's parameters."""

    def __init__(self, local_steps: LocalSteps) -> None:
        """Waits for what is in flight."""
        self.steps = 0
        self.numbers: dict[str, Any] = {}
        """Of the outer optimizer, what is no vector."""
        self.vectors: dict[str, dict[str, Tensor]] = {}
        """By kind (outer, outer_optimizer.KEY, mean, lost, drift, sent) and parameter; views."""
        told = local_steps.state_dict()
        names = {name.removeprefix("outer.") for name in told if name.startswith("outer.")}
        for full_key, value in told.items():
            kind, _, rest = full_key.partition(".")
            name, _, key = rest.rpartition(".")
            if kind == "steps":
                self.steps = value
            elif kind == "outer_optimizer" and name in names:
                self.vectors.setdefault(f"{kind}.{key}", {})[state.strip(name)] = value
            elif kind == "outer_optimizer":
                self.numbers[rest] = value
            else:
                self.vectors.setdefault(kind, {})[state.strip(rest)] = value

    def of(self, kind: str) -> dict[str, Tensor]:
        """By parameter."""
        return self.vectors.get(kind, {})

    @property
    def outer_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """By key and parameter."""
        return {kind.partition(".")[2]: by for kind, by in self.vectors.items() if kind.startswith("outer_optimizer.")}


def tree(
    model: nn.Module, local_steps: LocalSteps, assignment: Assignment, tensors: dict[str, Tensor], own: OptimizerStates
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """The model that islands agreed on, by parts; the rest of the tree; and what is for the sidecar.

    Args:
        tensors: the inner model's.
        own: optimizer state that is this island's.
    """
    agreed = Agreement(local_steps)
    places, parameters = state.places(model), state.named_parameters(model)
    outer = agreed.of("outer")
    model_tensors = {name: outer[name].to(t.dtype) if name in outer else t for name, t in tensors.items()}
    shared: dict[str, Any] = {
        _PARAMETERS: joined({n: t for n, t in outer.items() if parameters[n].dtype != t.dtype}, places),
        _MEAN: joined(agreed.of(_MEAN), places),
        _OPTIMIZER: {},
    }
    for key, by_name in agreed.outer_optimizer.items():
        for name, vector in joined(by_name, places).items():
            shared[_OPTIMIZER].setdefault(name, {})[key] = vector
    # Without mixing, what an island does not train is as in the outer parameters.
    inner = {name: tensors[name] for name in outer if parameters[name].requires_grad or local_steps.mixing}
    private: dict[str, Any] = {_PARAMETERS: inner, _OPTIMIZER: own}
    private |= {kind: agreed.of(kind) for kind in (_LOST, *_SENT)}
    rest = {OUTER: _filled(shared), ISLANDS: {str(assignment.island): _filled(private)}}
    return model_tensors, rest, {"steps": agreed.steps, "numbers": agreed.numbers}


def own_optimizer(island: int) -> str:
    """What comes before the names in an island's own optimizer state."""
    return f"{ISLANDS}.{island}.{_OPTIMIZER}."


def _filled(sections: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in sections.items() if section}


# -- reading -----------------------------------------------------------------------------------------------------------


def difference(saved: Assignment, ours: Assignment, *, had_islands: bool, has_islands: bool) -> str:
    """Why islands cannot go on where they were, to be told; empty if they can."""
    if not had_islands and not has_islands:
        return ""
    if not had_islands:
        return "was saved without islands: all start from its parameters"
    if not has_islands:
        return f"was saved by {_count(saved)}: this run goes on from what they agreed on"
    if saved.held == ours.held and saved.has_slices_of(ours):
        return ""
    if len(saved.held) != len(ours.held):
        why = f"was saved by {_count(saved)}, this run has {len(ours.held)}"
    else:
        why = f"was saved by islands that train slices {_slices(saved)}, this run's train {_slices(ours)}"
    return f"{why}: every island starts from the outer parameters, with the inner optimizer state that fits"


def _count(assignment: Assignment) -> str:
    return f"{len(assignment.held)} islands"


def _slices(assignment: Assignment) -> str:
    return f"{', '.join(map(str, assignment.held))} of {assignment.slices}"


@torch.no_grad()
def restore(
    source: Source,
    model: nn.Module,
    local_steps: LocalSteps,
    told: Mapping[str, Any] | None,
    *,
    step: int,
    island: int | None,
) -> None:
    """Have islands go on, once the model holds the agreed parameters. Collective.

    Args:
        told: what `tree` gave for the sidecar; None if there were no islands.
        step: of the checkpoint.
        island: whose inner parameters these ranks go on with; None: all start from the agreed ones.
    """
    for fragment in local_steps.fragments:
        fragment.have_state()
    places = state.places(model)
    ours = Agreement(local_steps)
    parameters = state.named_parameters(model)
    for name, outer in ours.of("outer").items():
        outer.copy_(_like(parameters[name], outer))
    shared = {f"{OUTER}.{_PARAMETERS}.{n}": t for n, t in joined(ours.of("outer"), places).items()}
    for key, by_name in ours.outer_optimizer.items():
        for vector in by_name.values():
            vector.zero_()
        shared |= {f"{OUTER}.{_OPTIMIZER}.{n}.{key}": t for n, t in joined(by_name, places).items()}
    for lost in ours.of(_LOST).values():
        lost.zero_()
    flying: dict[str, dict[str, Tensor]] = {}
    own: dict[str, Tensor] = {}
    if island is not None:
        prefix = f"{ISLANDS}.{island}"
        flying = _in_flight(source, local_steps, int((told or {})["steps"]), prefix)
        shared |= {f"{OUTER}.{_MEAN}.{n}": t for n, t in joined(flying.get(_MEAN, {}), places).items()}
        own = {f"{prefix}.{_PARAMETERS}.{name}": parameters[name].detach() for name in ours.of("outer")}
        for kind, by_name in {_LOST: ours.of(_LOST), **{kind: flying.get(kind, {}) for kind in _SENT}}.items():
            own |= {f"{prefix}.{kind}.{name}": tensor for name, tensor in by_name.items()}
    source.read({key: tensor for key, tensor in (shared | own).items() if key in source.entries})
    _load(local_steps, flying, step=int(told["steps"]) if told else step, numbers=told["numbers"] if told else {})


def _in_flight(source: Source, local_steps: LocalSteps, steps: int, prefix: str) -> dict[str, dict[str, Tensor]]:
    """Room for what was in flight, by kind and parameter, if this run's schedule has the same in flight."""
    schedule = local_steps.schedule
    sent = [schedule.sends(step) for step in range(max(1, steps - schedule.overlap + 1), steps + 1)]
    index = next((fragment for fragment in sent if fragment is not None), None)
    if index is None:
        return {}
    fragment = local_steps.fragments[index]
    saved = {key.removeprefix(f"{prefix}.drift.") for key in source.entries if key.startswith(f"{prefix}.drift.")}
    if saved != {state.strip(name) for name in fragment.parameters}:
        return {}
    return {
        kind: {state.strip(n): t for n, t in fragment.named(torch.zeros_like(fragment.flat.detach())).items()}
        for kind in (_MEAN, *_SENT)
    }


def _load(
    local_steps: LocalSteps, flying: Mapping[str, Mapping[str, Tensor]], *, step: int, numbers: Mapping[str, Any]
) -> None:
    """Give `LocalSteps` what its own vectors, which are filled, do not say."""
    told = {k: v for k, v in local_steps.state_dict().items() if k.partition(".")[0] not in (_MEAN, *_SENT)}
    told |= {f"outer_optimizer.{key}": number for key, number in numbers.items() if f"outer_optimizer.{key}" in told}
    names = {state.strip(name): name for fragment in local_steps.fragments for name in fragment.parameters}
    told |= {f"{kind}.{names[name]}": t for kind, by_name in flying.items() for name, t in by_name.items()}
    local_steps.load_state_dict({**told, "steps": step})


def _like(parameter: Tensor, outer: Tensor) -> Tensor:
    """A parameter's values where the outer ones rest."""
    return parameter.detach().to(outer.device, outer.dtype)
