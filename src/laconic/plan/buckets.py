"""The buckets of a unit as the engine will make them: by the planner of layouts, and the blocks of `fully_shard`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.layout.bucket import BucketLayout
from laconic.layout.granularity import Granularity, resolve
from laconic.plan.model_trace import ParameterSpec, UnitSpec
from laconic.shard.api import BucketKind, group_by_kind, plan_kind


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


@dataclass(frozen=True, kw_only=True)
class PlannedBucket:
    """One bucket of a unit."""

    layout: BucketLayout
    dtype: torch.dtype
    """The dtype of shards."""
    is_frozen: bool
    is_slice: bool
    """Whether its parameters are parts of a slice, which islands sync whether it trains here or not."""

    @property
    def shard_bytes(self) -> int:
        """The bytes of a shard at rest."""
        return self.layout.shard_numel * self.dtype.itemsize


def plan_buckets(unit: UnitSpec, shape: Shape, sharding: Sharding) -> tuple[PlannedBucket, ...]:
    """Plan the buckets of a unit as `fully_shard` does: one or more for each dtype and trainability.

    Raises:
        ValueError: the granularity does not fit a parameter.
    """
    blocks = _blocks_of(unit.parameters, sharding.granularity)
    groups = group_by_kind(zip(unit.parameters, blocks, strict=True), lambda pair: _kind_of(pair[0]))
    return tuple(
        bucket
        for kind, members in groups.items()
        for bucket in _plan_group(
            kind,
            tuple(members),
            shape,
            (sharding.precision.param_dtype, sharding.precision.reduce_dtype),
            may_shrink=sharding.granularity is None,
        )
    )


def _blocks_of(parameters: Sequence[ParameterSpec], granularity: Granularity | None) -> tuple[int, ...]:
    tensors = [(each.name, torch.empty(each.shape, dtype=each.dtype, device="meta")) for each in parameters]
    return resolve(granularity, tensors).numels


def _kind_of(parameter: ParameterSpec) -> BucketKind:
    return BucketKind(dtype=parameter.dtype, is_trained=parameter.is_trained, part=parameter.slice_index)


@cache  # equal layers share one plan
def _plan_group(
    kind: BucketKind,
    members: tuple[tuple[ParameterSpec, int], ...],
    shape: Shape,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    *,
    may_shrink: bool,
) -> tuple[PlannedBucket, ...]:
    """Plan the buckets of parameters of one kind, given with the elements of each one's blocks."""
    tensors = [(each.name, each.shape, block) for each, block in members]
    precision = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    plan = plan_kind(kind, tensors, precision, num_shards=shape.ranks, may_shrink=may_shrink)
    return tuple(
        PlannedBucket(layout=layout, dtype=kind.dtype, is_frozen=not kind.is_trained, is_slice=kind.part is not None)
        for layout in plan.buckets
    )
