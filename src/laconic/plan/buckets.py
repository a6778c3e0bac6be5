"""The buckets of a unit as the engine will make them, and the bytes of their shards and crossings.

All of it comes from the code that runs: the planner of layouts, the granularity of `fully_shard`, the payloads of
codecs. Only the tensors are missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.codec import CODECS, Codec
from laconic.codec.sums import Payload
from laconic.layout.bucket import BucketLayout
from laconic.layout.granularity import Granularity, resolve
from laconic.layout.planner import plan_unit
from laconic.plan.model_trace import ParameterSpec, UnitSpec
from laconic.shard.bucket import compute_dtype_of
from laconic.shard.kinds import BucketKind, group_by_kind
from laconic.shard.payload import parts_of_islands, payload_of, shards_of_nodes
from laconic.shard.policies import Wire

_MOST_PARTS = 64
"""The shards of a node shard whose payloads are looked at. More differ in nothing but where tensors happen to end."""


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
    wire: Wire = dataclasses.field(default_factory=Wire)
    device_type: str = "cuda"


@dataclass(frozen=True, kw_only=True)
class PlannedBucket:
    """One bucket of a unit. Bytes are those of one rank; those of a payload are a mean over the ranks of a node."""

    layout: BucketLayout
    shape: Shape
    dtype: torch.dtype
    """The dtype of shards."""
    wire_dtype: torch.dtype
    """The dtype of gathered parameters."""
    reduce_dtype: torch.dtype
    is_frozen: bool
    is_slice: bool
    """Whether its parameters are parts of a slice, which islands sync whether it trains here or not."""
    wire: Wire
    device_type: str

    @property
    def num_parameters(self) -> int:
        """The number of tensors."""
        return len(self.layout.slots)

    @property
    def shard_bytes(self) -> int:
        """The bytes of a shard at rest."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def node_shard_bytes(self) -> int:
        """The bytes of a gathered node shard."""
        return self.shape.nodes * self.layout.shard_numel * self.wire_dtype.itemsize

    @property
    def full_bytes(self) -> int:
        """The bytes of the gathered bucket."""
        return self.layout.numel * self.wire_dtype.itemsize

    @property
    def full_is_shard(self) -> bool:
        """True if the shard of a lone rank is the gathered bucket itself."""
        return self.shape.ranks == 1 and self.dtype == self.wire_dtype

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the bucket's gradients before they are reduced."""
        return self.layout.numel * self.reduce_dtype.itemsize

    @property
    def gradient_shard_bytes(self) -> int:
        """The bytes of a shard of gradients in the reduce dtype."""
        return self.layout.shard_numel * self.reduce_dtype.itemsize

    @property
    def keeps_own_bits(self) -> bool:
        """True if a cached node shard has the shard's own bits, so that a frozen shard may be dropped."""
        return self.wire.weights == "exact" and self.dtype == self.wire_dtype

    @cached_property
    def weight_payload_bytes(self) -> float | None:
        """The message of one rank to each other node, if weights are coded."""
        codec = self.wire.weight_codec
        return None if codec is None else self._between_nodes(codec, self.wire_dtype)

    @cached_property
    def gradient_payload_bytes(self) -> float | None:
        """The message of one rank to each other node, if gradients are coded."""
        codec = self.wire.gradient_codec
        rotates = self.wire.rotates_gradients
        return None if codec is None else self._between_nodes(codec, self.reduce_dtype, rotates=rotates)

    def replica_payload_bytes(self) -> tuple[float, float] | None:
        """The messages of one rank to each other island, there and back, if gradients are coded."""
        codec = self.wire.gradient_codec
        if codec is None:
            return None
        back = CODECS["bf16" if self.wire.gradients == "bf16" else "int8"]
        ways = ((codec, self.wire.rotates_gradients), (back, False))
        there_bytes, back_bytes = (self._between_islands(each, rotates) for each, rotates in ways)
        return there_bytes, back_bytes

    def _between_nodes(self, codec: Codec, plain: torch.dtype, *, rotates: bool = False) -> float:
        nodes = self.shape.nodes
        step = max(1, nodes // _MOST_PARTS)
        places = range(0, self.shape.local, max(1, self.shape.ranks // _MOST_PARTS))
        sizes = []
        for place in places:
            parts = shards_of_nodes(self.layout, range(place * nodes, (place + 1) * nodes, step))
            sizes.append(self._payload(parts, codec, plain, rotates=rotates).nbytes)
        return sum(sizes) / len(sizes)

    def _between_islands(self, codec: Codec, rotates: bool) -> float:
        shards = range(0, self.shape.ranks, max(1, self.shape.ranks // _MOST_PARTS))
        sizes = []
        for shard in shards:
            parts = parts_of_islands(self.layout, shard, self.shape.islands)
            sizes.append(self._payload(parts, codec, self.reduce_dtype, rotates=rotates).nbytes)
        return sum(sizes) / len(sizes)

    def _payload(self, parts: Sequence[object], codec: Codec, plain: torch.dtype, *, rotates: bool) -> Payload:
        return payload_of(self.layout, parts, codec, plain=plain, device_type=self.device_type, rotates=rotates)  # type: ignore[arg-type]


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
            sharding.wire,
            sharding.device_type,
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
    wire: Wire,
    device_type: str,
    *,
    may_shrink: bool,
) -> tuple[PlannedBucket, ...]:
    """Plan the buckets of parameters of one kind, given with the elements of each one's blocks."""
    wire_dtype = compute_dtype_of(kind.dtype, MixedPrecisionPolicy(param_dtype=dtypes[0]))
    reduce_dtype = dtypes[1] or wire_dtype
    plan = plan_unit(
        [each.name for each, _ in members],
        [each.shape for each, _ in members],
        [block for _, block in members],
        num_shards=shape.ranks,
        itemsize=min(each.itemsize for each in (kind.dtype, wire_dtype, reduce_dtype)),
        may_shrink=may_shrink,
    )
    return tuple(
        PlannedBucket(
            layout=layout,
            shape=shape,
            dtype=kind.dtype,
            wire_dtype=wire_dtype,
            reduce_dtype=reduce_dtype,
            is_frozen=not kind.is_trained,
            is_slice=kind.part is not None,
            wire=kind.wire(wire, layout, num_nodes=shape.nodes, num_islands=shape.islands),
            device_type=device_type,
        )
        for layout in plan.buckets
    )
