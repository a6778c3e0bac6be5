"""Put what a DCP folder holds into a model and an optimizer, and say what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laconic.checkpoint import parts, state, storage
from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.keys import Keys, by_parameter
from laconic.checkpoint.storage import Entry
from laconic.comm.agreement import RankGroup
from laconic.ragged.joined import joined

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Differences:
    """By what a checkpoint and a run differ: all of it. Optimizer state is listed as `NAME.KEY (optimizer)`."""

    missing: tuple[str, ...] = ()
    """Only in the run; left as it was."""
    unexpected: tuple[str, ...] = ()
    """Only in the checkpoint; not loaded."""
    different: tuple[str, ...] = ()
    """In both, of another shape or dtype, which is told; not loaded."""
    optimizer: str = ""
    """Why hyper-parameters could not be restored, which are then the run's."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different or self.optimizer)

    def __str__(self) -> str:
        told = {
            "only in the model": self.missing,
            "only in the checkpoint": self.unexpected,
            "different": self.different,
            "the optimizer": (self.optimizer,) if self.optimizer else (),
        }
        return "; ".join(f"{what}: {', '.join(items)}" for what, items in told.items() if items)

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            missing=self.missing + other.missing,
            unexpected=self.unexpected + other.unexpected,
            different=self.different + other.different,
            optimizer=self.optimizer or other.optimizer,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A DCP folder and how to read it."""

    folder: Path
    entries: Mapping[str, Entry]
    keys: Keys
    settings: dict[str, Any] | None
    """As `state.optimizer_settings` gives them; None if there are none."""
    own: str | None = None
    """What comes before the names in this island's own optimizer state, if it has any there."""
    has_same_slices: bool = True
    """Whether the parts of sliced parameters are the same ones there and here."""
    is_uneven: bool = False
    """Whether ranks may ask for different tensors, as islands do."""

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors by keys, in place. Collective."""
        if not self.is_uneven:
            storage.load(tensors, self.folder)
            return
        try:
            RankGroup(error=CheckpointError).on_all(
                lambda: storage.load(tensors, self.folder, offline=True), f"{self.folder} is not readable"
            )
        except CheckpointError as error:
            raise storage.StorageError(str(error)) from error

    def locate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> parts.Locations:
        """The optimizer's state by parameter and key."""
        return parts.locate(
            state.optimized(model, optimizer),
            state.places(model),
            self.keys.state_entries(self.entries),
            by_parameter(self.entries, self.own),
            common_prefix=self.keys.state or "",
            own_prefix=self.own or "",
            has_same_slices=self.has_same_slices,
        )


def fill(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, strict: bool) -> Differences:
    """Load in place. Collective; each rank reads what it holds.

    Raises: CheckpointError before any tensor is loaded, if `strict` and anything differs; or if the files are damaged.
    """
    places = state.places(model)
    wanted = joined(state.model_tensors(model), places)
    saved = source.keys.model_entries(source.entries)
    for alias in state.tied_names(model):
        saved.pop(alias, None)
    differences = compare(wanted, saved)
    fitting = {name: tensor for name, tensor in wanted.items() if saved.get(name) == Entry.of(tensor)}
    filled = {f"{source.keys.model}{name}": tensor for name, tensor in fitting.items()}
    copies: list[tuple[Tensor, Tensor]] = []
    if optimizer is not None:
        locations = source.locate(model, optimizer)
        unfit = {name for name in locations if parts.whole_name(name, places) not in fitting}
        differing, room = _prepare(source, model, optimizer, {n: at for n, at in locations.items() if n not in unfit})
        differences += differing
        states, copies = parts.targets(room, locations, places)
        filled |= states
    if differences and strict:
        raise CheckpointError(
            f"{source.folder} is a checkpoint of another model or optimizer ({differences}); use the configuration it "
            "was made with, pass strict=False to load what fits, or give another output folder"
        )
    source.read(filled)
    for number, same in copies:
        number.copy_(same)
    return differences


def _prepare(
    source: Source, model: nn.Module, optimizer: torch.optim.Optimizer, locations: parts.Locations
) -> tuple[Differences, dict[str, dict[str, Tensor]]]:
    """Restore hyper-parameters and make room for the state that was found. Returns what does not fit, and the room.

    Parts of sliced parameters may differ, as islands come and go and take up slices: what there is no state for, or
    none that fits, begins without.
    """
    saved = source.keys.state_entries(source.entries)
    if source.settings is None and not saved:
        return Differences(optimizer=f"was not saved, this run has {type(optimizer).__name__}"), {}
    problem = state.settings_problem(model, optimizer, source.settings) if source.settings else ""
    if source.settings and source.settings["class"] not in (None, type(optimizer).__name__):
        return Differences(optimizer=problem), {}  # its state means something else
    if source.settings and not problem:
        state.restore_optimizer_groups(optimizer, source.settings)
    found = {name: {key: at.entry for key, at in by_key.items()} for name, by_key in locations.items()}
    room = state.prepare_optimizer(model, optimizer, found)
    places, parameters = state.places(model), state.optimized(model, optimizer)
    ours = {name: tensors for name, tensors in room.items() if name not in places}
    theirs = {name: found.get(name, entries) for name, entries in saved.items()}
    theirs = {name: entries for name, entries in theirs.items() if not parts.is_of_slices(name, parameters, places)}
    differing = compare(_flat(ours), _flat(theirs), " (optimizer)")
    for name in [n for n, tensors in room.items() if {k: Entry.of(t) for k, t in tensors.items()} != found[n]]:
        del room[name], optimizer.state[parameters[name]]  # half a state is none
    if source.settings and not problem:
        state.restore_optimizer_numbers(model, optimizer, source.settings)
    return replace(differing, optimizer=problem), room


def _flat(nested: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    return {f"{name}.{key}": value for name, entries in nested.items() for key, value in entries.items()}


def compare(ours: Mapping[str, Tensor], saved: Mapping[str, Entry], kind: str = "") -> Differences:
    """`kind` is put after each name."""
    return Differences(
        missing=tuple(f"{name}{kind}" for name in sorted(ours.keys() - saved.keys())),
        unexpected=tuple(f"{name}{kind}" for name in sorted(saved.keys() - ours.keys())),
        different=tuple(
            f"{name}{kind} is {saved[name]} in the checkpoint and {Entry.of(ours[name])} in the model"
            for name in sorted(ours.keys() & saved.keys())
            if saved[name] != Entry.of(ours[name])
        ),
    )
