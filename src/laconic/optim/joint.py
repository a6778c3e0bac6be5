"""Matrices that other mesh axes have cut: the ranks over which they are put together.

[Note: Matrices over two meshes]
Expert and tensor parallelism cut a parameter before `fully_shard` does: [Note: Two parallelisms, two meshes] in
ragged/dtensor.py. A cut of another dim than the last two, such as that of a stack of experts, leaves every matrix whole
in one shard of the DTensor. `fully_shard` cuts this shard over some ranks. One of them owns the matrix, and nothing
crosses the other axis.

A cut of the last two dims, as tensor parallelism makes it, leaves a part of the matrix in each shard. Then one of all
ranks that hold a part owns it. These ranks, along the axes that cut and those of `fully_shard`, are one joint cluster.
The shards, flat and one after the other, are one tensor there, of which each rank holds one run. So it travels as every
matrix does. The owner puts the shards together by their places in the matrix, and takes its outcome apart likewise.

Unequal shards lie at different places in buckets of different sizes. So the ranks tell each other, once, before the
first step, where their shards lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from laconic.comm.agreement import RankGroup, ranks_or_self
from laconic.comm.cluster import Cluster
from laconic.comm.groups import is_rehearsed
from laconic.layout.bucket import Extent, RunsLayout
from laconic.ragged.dtensor import DTensorShard
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

DIFFERENT = (
    "ranks disagree about the matrices of this optimizer or their order, for instance because parameter groups were "
    "filled from a set; give every rank the same parameters in the same order"
)


@dataclass(frozen=True, kw_only=True)
class JointCut:
    """A matrix, or a stack of them, whose shards of other mesh axes lie one after the other in one flat tensor."""

    spec: RaggedSpec
    """The flat tensor's cut over the joint cluster."""
    shape: tuple[int, ...]
    """The shape of the matrix or the stack."""
    boxes: tuple[tuple[Any, ...], ...]
    """The place of each shard in it."""

    def assemble(self, flat: Tensor) -> Tensor:
        """Put the shards together: (numel,) -> `shape`, a copy."""
        whole = flat.new_empty(self.shape)
        places = [whole[box] for box in self.boxes]
        for place, shard in zip(places, flat.split([place.numel() for place in places]), strict=True):
            place.copy_(shard.view(place.shape))
        return whole

    def flatten(self, whole: Tensor) -> Tensor:
        """Take the whole apart: the inverse of `assemble`."""
        return torch.cat([whole[box].reshape(-1) for box in self.boxes])


@dataclass(frozen=True, kw_only=True)
class JointParameter:
    """This rank's shard of a parameter along the axes that leave matrices whole, put together along the others."""

    cluster: Cluster
    """The joint cluster."""
    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[slice, slice], ...]
    """The rows and the columns of each shard."""
    runs: tuple[tuple[int, Extent], ...]
    """For each rank of the joint cluster: the shard of which it holds a run, and the run of its elements."""

    def cut(self, index: int | None = None) -> JointCut:
        """The whole matrix or stack; with `index` that matrix of a stack of three dims."""
        shape = self.shape if index is None else self.shape[1:]
        numels = [math.prod(shape[:-2]) * (r.stop - r.start) * (c.stop - c.start) for r, c in self.boxes]
        begins = [*accumulate(numels, initial=0)]
        extents = []
        for shard, run in self.runs:
            low = (index or 0) * numels[shard]
            start, stop = (min(max(place - low, 0), numels[shard]) for place in (run.start, run.stop))
            extents.append(Extent(begins[shard] + start, begins[shard] + stop))
        layout = RunsLayout.of(self.name, (begins[-1],), extents)
        spec = RaggedSpec(cluster=self.cluster, layout=layout, index=0)
        return JointCut(spec=spec, shape=shape, boxes=tuple((..., *box) for box in self.boxes))


def join(chosen: Sequence[RaggedTensor], all_parameters: Iterable[RaggedTensor]) -> dict[Tensor, JointParameter]:
    """Put together the `chosen` parameters of which other mesh axes cut the last two dims. Collective.

    Every rank calls this with the same parameters in the same order: those that it has chosen, and all that another
    rank may have chosen.

    Cost: one message from each rank to each other along the axes that cut, and one bit inside each cluster.

    Raises:
        ValueError: ranks have chosen different parameters; on all ranks of the joint cluster.
    """
    by_ranks: dict[tuple[Cluster, tuple[dist.ProcessGroup, ...]], list[RaggedTensor]] = {}
    for parameter in all_parameters:
        if groups := _groups_that_cut(parameter.spec):
            by_ranks.setdefault((parameter.spec.cluster, groups), []).append(parameter)
    picked = set(chosen)
    told, are_alike = [], True
    for (cluster, groups), parameters in by_ranks.items():
        own = [parameter for parameter in parameters if parameter in picked]
        everyone = _told_by_all(cluster, groups, own)
        are_alike &= all(each["names"] == everyone[0]["names"] for each in everyone)
        told.append((cluster, own, everyone))
    for cluster in dict.fromkeys(cluster for cluster, _ in by_ranks):  # all ranks raise, or none
        are_alike = all(ranks_or_self(cluster.flag_group).gather(are_alike))
    if not are_alike:
        raise ValueError(DIFFERENT)
    joined: dict[Tensor, JointParameter] = {}
    for cluster, own, everyone in told:
        if own:
            joined |= _joined(cluster, own, everyone)
    return joined


def stack_state(shard: DTensorShard | None, shape: tuple[int, ...]) -> DTensorShard | None:
    """The place of state that an owner keeps for each matrix of a stack; None if the owner's stack is the whole.

    `shape` is that of the state for the whole stack. It begins with the dims of the stack, which axes of other meshes
    may cut.
    """
    if shard is None:
        return None
    num_dims = len(shard.shape) - 2
    cutting = shard.axes_that_cut(range(num_dims, len(shard.shape)))
    stack = shard.local_shape[:num_dims]
    if stack == shard.shape[:num_dims]:
        return None
    return replace(
        shard,
        placements=tuple(
            Replicate() if isinstance(placement, Shard) and placement.dim >= num_dims else placement
            for placement in shard.placements
        ),
        outer_axes=tuple(axis for axis in shard.outer_axes if axis not in cutting),
        shape=shape,
        offset=(*shard.offset[:num_dims], *[0] * (len(shape) - num_dims)),
        local_shape=(*stack, *shape[num_dims:]),
    )


def _groups_that_cut(spec: RaggedSpec) -> tuple[dist.ProcessGroup, ...]:
    """The ranks along each outer axis that cuts one of the last two dims; none for a vector."""
    shard = spec.dtensor
    if shard is None or len(shard.shape) < 2:
        return ()
    axes = shard.axes_that_cut((len(shard.shape) - 2, len(shard.shape) - 1))
    return tuple(shard.mesh.get_group(axis) for axis in axes)


def _told_by_all(
    cluster: Cluster, groups: Sequence[dist.ProcessGroup], parameters: Sequence[RaggedTensor]
) -> list[dict[str, Any]]:
    """What the ranks of each shard tell of the parameters, in the order of ranks; alike on all of them.

    Raises:
        ValueError: the other ranks are not there to tell.
    """
    if any(is_rehearsed(group) for group in groups):
        if not parameters:
            return []
        raise ValueError(
            f"a rehearsal has no ranks that tell where their shards of {len(parameters)} matrices lie, which tensor "
            "parallelism has cut; rehearse without tensor parallelism, or put the matrices into a group with "
            'algorithm="adamw"'
        )
    own = {
        "ranks": [cluster.global_rank(shard) for shard in range(cluster.size)],
        "names": [f"{parameter.spec.slot.name} {tuple(parameter.shape)}" for parameter in parameters],
        "shards": [_described(parameter.spec) for parameter in parameters],
    }
    told = [own]
    for group in groups:
        told = [each for theirs in RankGroup(group).gather(told) for each in theirs]
    return sorted(told, key=lambda each: each["ranks"])


def _described(spec: RaggedSpec) -> list[list[Any]]:
    """Where a shard lies: its row and column in the matrix, its numbers of both, and the run of each of its ranks."""
    assert spec.dtensor is not None
    runs = [[run.start, run.stop] for run in map(spec.held_by, range(spec.layout.num_shards))]
    return [list(spec.dtensor.offset[-2:]), list(spec.slot.shape[-2:]), runs]


def _joined(
    cluster: Cluster, parameters: Sequence[RaggedTensor], told: Sequence[dict[str, Any]]
) -> dict[Tensor, JointParameter]:
    where = {rank: (part, own) for part, each in enumerate(told) for own, rank in enumerate(each["ranks"])}
    joint = Cluster.over(where, cluster)
    places = [where[joint.global_rank(shard)] for shard in range(joint.size)]
    joined: dict[Tensor, JointParameter] = {}
    for index, parameter in enumerate(parameters):
        shards = [each["shards"][index] for each in told]
        joined[parameter] = JointParameter(
            cluster=joint,
            name=parameter.spec.slot.name,
            shape=(*parameter.spec.slot.shape[:-2], *parameter.shape[-2:]),
            boxes=tuple(
                (slice(row, row + rows), slice(column, column + columns))
                for (row, column), (rows, columns), _ in shards
            ),
            runs=tuple((part, Extent(*shards[part][-1][own])) for part, own in places),
        )
    return joined
