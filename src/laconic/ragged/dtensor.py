"""Parameters that another parallelism has cut over its own mesh axis before `fully_shard` cuts them.

[Note: Two parallelisms, two meshes]
Tensor parallelism and expert parallelism cut a parameter first, over their own mesh axis. Each rank then has one shard
of a DTensor. `fully_shard` cuts this shard again, among the ranks that have the same place on the other axis. Between
uses the parameter is a RaggedTensor of the *global* shape, and its elements are a run of the DTensor's shard. When the
parameter is gathered, it is the DTensor again, so the module computes as before. Norms sum over both meshes, and count
an element once if the other axis replicates it. Checkpoints hold global coordinates, so a checkpoint loads under any
other cut of the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.ragged.boxed import BoxedTensor


@dataclass(frozen=True)
class DTensorShard:
    """This rank's shard of a DTensor parameter, which `fully_shard` cuts further. `shape` is the global shape."""

    mesh: DeviceMesh
    placement: Shard | Replicate
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """The global coordinates at which the shard begins."""
    local_shape: tuple[int, ...]

    @staticmethod
    def of(parameter: Tensor, name: str, cluster: Cluster) -> DTensorShard | None:
        """Describe this rank's shard of `parameter`, which `fully_shard` will cut over `cluster`; None for a plain one.

        Raises:
            ValueError: a DTensor is cut over several axes or over ranks of `cluster`, or has another placement than
                Shard or Replicate.
        """
        if not is_torch_dtensor(parameter):
            return None
        mesh, placement = parameter.device_mesh, parameter.placements[0]
        if len(parameter.placements) != 1 or not (type(placement) is Shard or type(placement) is Replicate):
            raise ValueError(
                f"{name} is a DTensor with placements {parameter.placements}; fully_shard composes with one other mesh "
                "axis, Shard(dim) or Replicate(). Shard it over one axis only, before fully_shard"
            )
        if len(cluster.ranks & set(mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"{name} is a DTensor over ranks {mesh.mesh.flatten().tolist()}, which are in the mesh of fully_shard "
                "as well; give fully_shard the other axes only, such as mesh['dp'] of a mesh ('dp', 'tp')"
            )
        with torch.device("cpu"):  # torch reads numbers from a tensor of the default device, which may be meta
            local_shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        return DTensorShard(mesh, placement, tuple(parameter.shape), tuple(offset), tuple(local_shape))

    @property
    def is_replica(self) -> bool:
        """True if another rank of `mesh` holds the same elements and counts them in norms."""
        return isinstance(self.placement, Replicate) and self.mesh.get_local_rank() != 0

    def part_of(self, whole: Tensor) -> Tensor:
        """Select this rank's shard of a plain tensor of the global shape: a view."""
        for dim, (start, size) in enumerate(zip(self.offset, self.local_shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole

    def to_dtensor(self, shard: Tensor) -> DTensor:
        """Wrap `shard`, of the local shape, as this rank's shard of the DTensor."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            shard, self.mesh, [self.placement], run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def part_of_gradient(self, gradient: Tensor) -> Tensor:
        """Select this rank's shard of the gradient that autograd made; finish sums over `mesh` that are pending.

        Raises:
            ValueError: the gradient is a plain tensor.
        """
        if not isinstance(gradient, DTensor):
            raise ValueError(
                f"a gradient of a DTensor parameter came as a plain tensor of shape {tuple(gradient.shape)}"
            )
        if gradient.placements != (self.placement,):
            gradient = gradient.redistribute(placements=[self.placement])
        return gradient.to_local()


def is_torch_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """True for a DTensor of torch's own; False for a RaggedTensor: [Note: RaggedTensors are DTensors]."""
    return isinstance(tensor, DTensor) and not isinstance(tensor, BoxedTensor)


def whole_of(tensor: DTensor) -> Tensor:
    """Gather a DTensor of torch's own, axis by axis, as torch warns of a gather over several at once. Collective."""
    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def local_part(parameter: Tensor) -> Tensor:
    """The elements that this rank holds before `fully_shard`: its shard of a DTensor, or all of a plain parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def common_mesh(meshes: Iterable[DeviceMesh | None]) -> DeviceMesh | None:
    """The only DTensor mesh among `meshes`, one entry per tensor; None if no tensor is a DTensor.

    Raises:
        NotImplementedError: there are several meshes.
    """
    found = [mesh for mesh in meshes if mesh is not None]
    if any(mesh != found[0] for mesh in found):
        raise NotImplementedError(
            "one operation got tensors that are DTensors over different meshes; call it once for each mesh"
        )
    return found[0] if found else None


def all_reduce_both(tensor: Tensor, cluster: Cluster, mesh: DeviceMesh | None, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce a small tensor in place over `cluster`, then over the DTensor mesh unless `mesh` is None. Collective."""
    all_reduce(cluster, tensor, op)
    if mesh is not None:
        dist.all_reduce(tensor, op, group=mesh.get_group())
    return tensor
