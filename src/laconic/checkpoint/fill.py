"""Fill a model and an optimizer from a DCP folder, and list what does not fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state, storage
from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.keys import Keys, by_parameter
from laconic.checkpoint.storage import TensorMeta
from laconic.ragged.parts import JoinedTensor, joined

_PART = re.compile(r"_(slice\d+|shared)$")


@dataclass(frozen=True, kw_only=True)
class Differences:
    """All differences between a checkpoint and a run. Optimizer state is listed as `NAME.KEY (optimizer)`."""

    missing: tuple[str, ...] = ()
    """Tensors that only the run has; they stay as they were."""
    unexpected: tuple[str, ...] = ()
    """Tensors that only the checkpoint has; they are not loaded."""
    different: tuple[str, ...] = ()
    """Tensors whose shape or dtype differs, with both; they are not loaded."""
    optimizer: str = ""
    """Why hyper-parameters were not restored; empty if they were. They stay as the run has them."""

    def __bool__(self) -> bool:
        return self != Differences()

    def __str__(self) -> str:
        lists = {
            "only in the model": self.missing,
            "only in the checkpoint": self.unexpected,
            "different": self.different,
            "the optimizer": (self.optimizer,) if self.optimizer else (),
        }
        return "; ".join(f"{title}: {', '.join(items)}" for title, items in lists.items() if items)

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            missing=self.missing + other.missing,
            unexpected=self.unexpected + other.unexpected,
            different=self.different + other.different,
            optimizer=self.optimizer or other.optimizer,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A DCP folder, and how to read it."""

    folder: Path
    entries: Mapping[str, TensorMeta]
    keys: Keys
    settings: dict[str, Any] | None
    """The saved optimizer's `state.optimizer_settings`; None if the folder has no settings."""
    own_prefix: str | None = None
    """The prefix of this island's own optimizer state; None if the folder has no such state that fits."""
    has_same_slices: bool = True
    """True if sliced parameters have the same parts in the folder and in the run."""

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors by key, in place. Collective; each rank reads its part. Raises StorageError on all ranks."""
        storage.load(tensors, self.folder)


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A tensor of an optimizer's state in a folder."""

    key: str
    entry: TensorMeta
    """The shape and dtype that the tensor has in this run."""
    is_whole: bool = False
    """True if this run has a part of the tensor, and the folder has the parts joined."""


_StoredStates = dict[str, dict[str, _Stored]]
"""The optimizer's state in a folder: by this run's parameters, then by key."""


def fill(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, strict: bool) -> Differences:
    """Load a model and an optimizer in place. Returns all that was not loaded. Collective; each rank reads its part.

    Raises CheckpointError, before any tensor is loaded, if `strict` and anything differs; StorageError for damage.
    """
    places, others = state.places(model), state.elsewhere(model)
    wanted = joined(state.model_tensors(model), places)
    saved = source.keys.model_entries(source.entries)
    for alias in state.tied_names(model):
        saved.pop(alias, None)
    differences = _compare({name: TensorMeta.of(tensor) for name, tensor in wanted.items()}, saved)
    fitting = {name: tensor for name, tensor in wanted.items() if saved.get(name) == TensorMeta.of(tensor)}
    targets = {f"{source.keys.model}{name}": tensor for name, tensor in fitting.items() if name not in others}
    copies: list[tuple[Tensor, Tensor]] = []
    if optimizer is not None:
        stored = _stored_states(source, state.optimized(model, optimizer), places)
        stored = {name: by_key for name, by_key in stored.items() if _whole_name(name, places) in fitting}
        differing, room = _prepare(source, model, optimizer, stored)
        differences += differing
        copies = _add_targets(targets, room, stored, places)
    if differences and strict:
        raise CheckpointError(
            f"{source.folder} is a checkpoint of another model or optimizer ({differences}); use the configuration it "
            "was made with, pass strict=False to load what fits, or give another output folder"
        )
    source.read(targets)
    for copy, original in copies:
        copy.copy_(original)
    return differences


def _stored_states(source: Source, parameters: Mapping[str, Tensor], places: state.Places) -> _StoredStates:
    """Find the stored state of parameters. An island's own state replaces the state for all islands."""
    common, own = source.keys.state_entries(source.entries), by_parameter(source.entries, source.own_prefix)
    found: _StoredStates = {}
    for name, parameter in parameters.items():
        whole, sliced, _ = places.get(name, (name, None, 0))
        stored: dict[str, _Stored] = {}
        if sliced is not None and whole in common:
            for key, entry in common[whole].items():
                is_whole = entry.shape == sliced.shape
                shown = TensorMeta(tuple(parameter.shape), entry.dtype) if is_whole else entry
                stored[key] = _Stored(key=f"{source.keys.state}{whole}.{key}", entry=shown, is_whole=is_whole)
        elif sliced is None or source.has_same_slices:
            for key, entry in common.get(name, {}).items():
                stored[key] = _Stored(key=f"{source.keys.state}{name}.{key}", entry=entry)
        for key, entry in own.get(name, {}).items():
            stored[key] = _Stored(key=f"{source.own_prefix}{name}.{key}", entry=entry)
        if stored:
            found[name] = stored
    return found


def _prepare(
    source: Source, model: nn.Module, optimizer: torch.optim.Optimizer, stored: _StoredStates
) -> tuple[Differences, dict[str, dict[str, Tensor]]]:
    """Restore hyper-parameters, and make room for the stored state. Returns the differences, and the empty tensors."""
    saved, settings = source.keys.state_entries(source.entries), source.settings
    if settings is None and not saved:
        return Differences(optimizer=f"was not saved, this run has {type(optimizer).__name__}"), {}
    problem = state.settings_problem(model, optimizer, settings) if settings else ""
    if settings and settings["class"] not in (None, type(optimizer).__name__):
        return Differences(optimizer=problem), {}  # the state of another class has another meaning
    if settings and not problem:
        state.restore_optimizer_groups(optimizer, settings)
    found = {name: {key: one.entry for key, one in by_key.items()} for name, by_key in stored.items()}
    room = state.prepare_optimizer(model, optimizer, found)
    made = {name: {key: TensorMeta.of(tensor) for key, tensor in tensors.items()} for name, tensors in room.items()}
    places, parameters = state.places(model), state.optimized(model, optimizer)
    # State of sliced parameters may differ, as islands come and go. A part without fitting state starts without state.
    others = state.elsewhere(model) | _sliced_names(saved, parameters, places)
    differing = _compare(
        _flat({name: entries for name, entries in made.items() if name not in places}),
        _flat({name: found.get(name, entries) for name, entries in saved.items() if name not in others}),
        " (optimizer)",
    )
    for name in [name for name, entries in made.items() if entries != found[name]]:
        del room[name], optimizer.state[parameters[name]]  # an optimizer cannot step with half a state
    if settings and not problem:
        state.restore_optimizer_numbers(model, optimizer, settings)
    return replace(differing, optimizer=problem), room


def _add_targets(
    targets: dict[str, Tensor], room: dict[str, dict[str, Tensor]], stored: _StoredStates, places: state.Places
) -> list[tuple[Tensor, Tensor]]:
    """Add the tensors of `room` to `targets`, by key. Returns (copy, original) for each number that parts share."""
    parts: dict[str, list[Tensor | None]] = {}
    copies = []
    for name, tensors in room.items():
        for key, tensor in tensors.items():
            one = stored[name][key]
            if one.is_whole:
                _, sliced, index = places[name]
                parts.setdefault(one.key, [None] * len(sliced.part_names))[index] = tensor
                targets[one.key] = JoinedTensor(sliced, parts[one.key])
            elif one.key in targets:
                copies.append((tensor, targets[one.key]))
            else:
                targets[one.key] = tensor
    return copies


def _whole_name(name: str, places: state.Places) -> str:
    return places[name][0] if name in places else name


def _sliced_names(saved: Iterable[str], parameters: Collection[str], places: state.Places) -> set[str]:
    """Return the parameters in `saved` that this run slices, or that the run that saved them has sliced."""
    sliced = {whole for whole, _, _ in places.values()}
    wholes = {_whole_name(name, places) for name in parameters}
    candidates = {name for name in saved if name not in parameters or name in places}
    return {n for n in candidates if n in sliced or ((whole := _PART.sub("", n)) != n and whole in wholes)}


def _flat(nested: Mapping[str, Mapping[str, TensorMeta]]) -> dict[str, TensorMeta]:
    return {f"{name}.{key}": entry for name, entries in nested.items() for key, entry in entries.items()}


def _compare(wanted: Mapping[str, TensorMeta], saved: Mapping[str, TensorMeta], suffix: str = "") -> Differences:
    return Differences(
        missing=tuple(f"{name}{suffix}" for name in sorted(wanted.keys() - saved.keys())),
        unexpected=tuple(f"{name}{suffix}" for name in sorted(saved.keys() - wanted.keys())),
        different=tuple(
            f"{name}{suffix} is {saved[name]} in the checkpoint and {wanted[name]} in the model"
            for name in sorted(wanted.keys() & saved.keys())
            if saved[name] != wanted[name]
        ),
    )
