"""The slice that every island trains, and a comparison of the slices of a checkpoint and a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from laconic.checkpoint import state
from laconic.comm.agreement import RankGroup
from laconic.islands.local_steps import LocalSteps


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
        else:
            why = f"was saved by islands that train slices {saved._listing()}, this run's train {self._listing()}"
        return f"{why}: every island starts from the outer parameters, with the inner optimizer state that fits"

    def _listing(self) -> str:
        return f"{', '.join(map(str, self.held))} of {self.num_slices}"
