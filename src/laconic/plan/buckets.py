"""The ranks that share a model, and how each unit is sharded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.layout.granularity import Granularity


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ranks that share a model: islands of nodes of local ranks."""

    nodes: int
    """The nodes of one island."""
    local: int
    """The ranks of one node."""
    islands: int = 1

    @property
    def ranks(self) -> int:
        """The ranks of one island."""
        return self.nodes * self.local


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How `fully_shard` was asked to shard every unit."""

    precision: MixedPrecisionPolicy = dataclasses.field(default_factory=MixedPrecisionPolicy)
    granularity: Granularity | None = None
