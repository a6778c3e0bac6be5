"""Parameters that other parallelisms have cut over their own mesh axes before `fully_shard` cuts them.

[Note: Two parallelisms, two meshes]
Tensor parallelism and expert parallelism cut a parameter first, each over a mesh axis of its own. Each rank then has
one shard of a DTensor. `fully_shard` cuts this shard again, among the ranks that have the same place on these *outer
axes*. Between uses the parameter is a RaggedTensor of the *global* shape, and its elements are a run of the DTensor's
shard. When the parameter is gathered, it is the DTensor again, so the module computes as before. Norms sum over all
axes, and count an element once if an outer axis replicates it. Checkpoints hold global coordinates, so a checkpoint
loads under any other cut of the DTensor. They write an element once if all its replicas are cut alike. So a DTensor
with unequal shards shares a bucket only with DTensors of the same placements: else its replicas, or those of its
neighbours in the bucket, would lie at other places of buckets of other sizes.

A DTensor may also lie over the axes of `fully_shard` itself, if `dp_mesh_dims` names them: it replicates there, and
`fully_shard` cuts the replicas. Along these axes autograd leaves sums pending, and the reduction of gradients ends
them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.ragged.parts import BoxedTensor


@dataclass(frozen=True)
class DTensorShard:
    """This rank's shard of a DTensor parameter, which `fully_shard` cuts further. `shape` is the global shape."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """Shard or Replicate for each axis of `mesh`."""
    outer_axes: tuple[int, ...]
    """The axes of `mesh` over which `fully_shard` does not cut."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """The global coordinates at which the shard begins."""
    local_shape: tuple[int, ...]

    @staticmethod
    def of(parameter: Tensor, cluster: Cluster) -> DTensorShard | None:
        """Describe this rank's shard of `parameter`, which `fully_shard` will cut over `cluster`; None for a plain one.

        `check_dtensor` has accepted the parameter.
        """
        if not is_torch_dtensor(parameter):
            return None
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        local_shape, offset = _compat.local_box(parameter.shape, mesh, placements)
        outer_axes = _outer_axes(mesh, cluster)
        return DTensorShard(mesh, placements, outer_axes, tuple(parameter.shape), offset, local_shape)

    @property
    def outer_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks along each outer axis."""
        return tuple(self.mesh.get_group(axis) for axis in self.outer_axes)

    def axes_that_cut(self, dims: Container[int]) -> tuple[int, ...]:
        """The outer axes of several ranks that cut one of `dims`."""
        return tuple(
            axis
            for axis in self.outer_axes
            if isinstance(placement := self.placements[axis], Shard)
            and placement.dim in dims
            and self.mesh.size(axis) > 1
        )

    def runs_along(self, dim: int, size: int) -> list[range]:
        """The indices of each shard, if a dim of `size` is cut as `dim` of the parameter; shards without any left out.

        Axes cut one after the other, each as `torch.chunk` does.
        """
        runs = [range(size)]
        for axis in self.axes_that_cut((dim,)):
            num_parts = self.mesh.size(axis)
            runs = [
                run[begin : begin + most]
                for run in runs
                if (most := -(-len(run) // num_parts))
                for begin in range(0, len(run), most)
            ]
        return runs

    @property
    def is_replica(self) -> bool:
        """True if another rank along the outer axes holds the same elements and counts them in norms."""
        place = self.mesh.get_coordinate()
        assert place is not None, "this rank is not in the DTensor's mesh"
        return any(self.placements[axis].is_replicate() and place[axis] != 0 for axis in self.outer_axes)

    def part_of(self, whole: Tensor) -> Tensor:
        """Select this rank's shard of a plain tensor of the global shape: a view."""
        for dim, (start, size) in enumerate(zip(self.offset, self.local_shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole

    def to_dtensor(self, shard: Tensor) -> DTensor:
        """Wrap `shard`, of the local shape, as this rank's shard of the DTensor."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            shard, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def part_of_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Select this rank's shard of the gradient that autograd made; finish sums over outer axes that are pending.

        They are summed in `dtype`, as those over the other axes, which stay pending: `fully_shard` reduces gradients
        over these.

        Raises:
            ValueError: the gradient is a plain tensor.
        """
        if not isinstance(gradient, DTensor):
            raise ValueError(
                f"a gradient of a DTensor parameter came as a plain tensor of shape {tuple(gradient.shape)}"
            )
        placements = tuple(
            found if found.is_partial() and axis not in self.outer_axes else own
            for axis, (own, found) in enumerate(zip(self.placements, gradient.placements, strict=True))
        )
        if gradient.placements != placements:
            summed = cast(DTensor, gradient.to(dtype)).redistribute(placements=placements)
            return summed.to_local()
        return gradient.to_local()


def check_dtensor(parameter: Tensor, name: str, cluster: Cluster, *, whole_mesh: DeviceMesh | None) -> None:
    """Check that `fully_shard` can cut `parameter` over `cluster`, if it is a DTensor of torch's own.

    Raises:
        ValueError: a DTensor has another placement than Shard or Replicate; or it lies over ranks of `cluster`. Over
            axes of `whole_mesh`, of which `cluster` has some, it may. It must have each axis of `cluster` whole or not
            at all, and its placement there must be Replicate.
    """
    if not is_torch_dtensor(parameter):
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    if not all(type(placement) is Shard or type(placement) is Replicate for placement in placements):
        raise ValueError(
            f"{name} is a DTensor with placements {placements}; fully_shard cuts DTensors whose placements are "
            "Shard(dim) or Replicate(). Redistribute it to such placements before fully_shard"
        )
    shared = _ranks_of(mesh) & cluster.ranks
    if whole_mesh is not None and not _is_part_of(mesh, whole_mesh):
        raise ValueError(
            f"{name} is a DTensor over another mesh, {mesh}, than fully_shard got beside dp_mesh_dims, {whole_mesh}; "
            "distribute it over that mesh, or over axes of it"
        )
    if len(shared) > 1 and whole_mesh is None:
        raise ValueError(
            f"{name} is a DTensor over ranks {sorted(_ranks_of(mesh))}, which are in the mesh of fully_shard as well; "
            "give fully_shard the other axes only, such as mesh['dp'] of a mesh ('dp', 'tp'), or name its axes in "
            "dp_mesh_dims"
        )
    inner = set(range(mesh.ndim)).difference(_outer_axes(mesh, cluster))
    is_along_axes = len(shared) == math.prod(mesh.size(axis) for axis in inner)
    if not is_along_axes or not all(placements[axis].is_replicate() for axis in inner):
        raise ValueError(
            f"{name} is a DTensor with placements {placements} over axes {mesh.mesh_dim_names}; along the axes over "
            "which fully_shard cuts it must be Replicate(), and it must have each of these axes whole or not at all"
        )


def _is_part_of(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """True if a mesh is the whole one, or some of its axes."""
    names = mesh.mesh_dim_names or ()
    own = tuple(name for name in whole.mesh_dim_names or () if name in names)
    return mesh == whole or (own == names and len(own) > 0 and mesh == whole[own])


def uneven_cut(parameter: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """The cut of a DTensor whose shards have unequal shapes; None for any other parameter.

    Parameters of one bucket have the same: [Note: Two parallelisms, two meshes].
    """
    if not is_torch_dtensor(parameter):
        return None
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    num_parts = [1] * parameter.ndim
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            num_parts[placement.dim] *= mesh.size(axis)
    is_even = all(size % parts == 0 for size, parts in zip(parameter.shape, num_parts, strict=True))
    return None if is_even else (mesh, placements)


def is_torch_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """True for a DTensor of torch's own; False for a RaggedTensor: [Note: RaggedTensors are DTensors]."""
    return isinstance(tensor, DTensor) and not isinstance(tensor, BoxedTensor)


def whole_of(tensor: DTensor) -> Tensor:
    """Gather a DTensor of torch's own, axis by axis, as torch warns of a gather over several at once. Collective."""
    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):
        if not placements[axis].is_replicate():  # torch 2.11 has no way to leave it as it is
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def all_reduce_outer(groups: Iterable[dist.ProcessGroup], tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce a small tensor in place along the outer axes of a DTensor, whose ranks are `groups`. Collective."""
    for group in groups:
        dist.all_reduce(tensor, op, group=group)
    return tensor


def _outer_axes(mesh: DeviceMesh, cluster: Cluster) -> tuple[int, ...]:
    """The axes of a DTensor's mesh along which not all ranks are in `cluster`; an axis of one rank is one, too."""
    return tuple(
        axis
        for axis, group in enumerate(mesh.get_all_groups())
        if group.size() == 1 or not cluster.ranks.issuperset(dist.get_process_group_ranks(group))
    )


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())
