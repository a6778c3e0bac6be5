"""The kinds of a unit's parameters, and the wire policy of each, for the engine and for the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from laconic.layout.bucket import BucketLayout
from laconic.shard.policies import Wire

_Parameter = TypeVar("_Parameter")


@dataclass(frozen=True, kw_only=True)
class BucketKind:
    """The properties that all parameters of a bucket share. A LoRA block has parameters of two kinds."""

    dtype: torch.dtype
    """The dtype of shards."""
    is_trained: bool
    part: Hashable = None
    """The slice of partial updates. Each has buckets of its own, trained or not, so that all islands have the same."""
    place: Hashable = None
    """The ranks and the device that hold the parameters."""
    converted: type | None = None
    """The class of parameters that convert themselves: [Note: Conversion] in codec/conversion.py."""
    chunk: Hashable = None
    """The name of a parameter whose conversion needs FSDP2's equal chunks; it has a bucket of its own."""
    cut: Hashable = None
    """The way in which DTensors are cut into unequal shards; see `uneven_cut` in ragged/dtensor.py."""

    def wire(self, policy: Wire, layout: BucketLayout, *, num_nodes: int, num_islands: int) -> Wire:
        """The policy of a bucket of this kind: exact if it is frozen, converts itself, or has vectors alone.

        Weights cross between nodes only; gradients cross between islands, too.
        """
        may_be_coded = self.is_trained and self.dtype.is_floating_point and self.converted is None
        has_matrix = any(len(slot.shape) > 1 for slot in layout.slots)
        if not (may_be_coded and has_matrix and max(num_nodes, num_islands) > 1):
            return Wire()
        return policy if num_nodes > 1 else dataclasses.replace(policy, weights="exact", as_values=False)


def group_by_kind(
    parameters: Iterable[_Parameter], kind_of: Callable[[_Parameter], BucketKind]
) -> dict[BucketKind, list[_Parameter]]:
    """Group the parameters of a unit by kind. Kinds and their parameters stay in order of appearance."""
    groups: dict[BucketKind, list[_Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(kind_of(parameter), []).append(parameter)
    return groups
