"""Parameters that another parallelism has cut already: a DTensor's shard on a mesh axis of its own.

[Note: Two parallelisms, two meshes]
Tensor (or expert) parallelism cuts a parameter first, over its own axis; what a rank holds of it then is cut again over
the mesh of `fully_shard`, among the ranks with the same place on the outer axis. Between uses the parameter is a
RaggedTensor of the *global* shape whose elements are a run of the outer shard; gathered, it is the DTensor it was, so
the module computes as before. Norms sum over both meshes, counting what the outer axis only repeats once; checkpoints
hold global coordinates, so they load under any other outer cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from laconic.comm.cluster import Cluster


@dataclass(frozen=True)
class OuterShard:
    """This rank's part of a parameter on the outer axis."""

    mesh: DeviceMesh
    placement: Shard | Replicate
    shape: tuple[int, ...]
    """Global."""
    offset: tuple[int, ...]
    """Of this rank's part in the global tensor."""
    local_shape: tuple[int, ...]

    @staticmethod
    def of(parameter: Tensor, name: str, cluster: Cluster) -> OuterShard | None:
        """What an outer parallelism has made of `parameter`, which `cluster` is to cut further; None for plain tensors.

        Raises:
            ValueError: a DTensor over several axes, or neither sharded nor replicated, or over the axes of `cluster`.
        """
        if not isinstance(parameter, DTensor):
            return None
        mesh, placement = parameter.device_mesh, parameter.placements[0]
        if len(parameter.placements) != 1 or not (type(placement) is Shard or type(placement) is Replicate):
            raise ValueError(
                f"{name} is a DTensor with placements {parameter.placements}; fully_shard composes with one other mesh "
                "axis, Shard(dim) or Replicate(). Shard it over one axis only, and over that before fully_shard"
            )
        if len(cluster.ranks & set(mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"{name} is a DTensor over ranks {mesh.mesh.flatten().tolist()}, which are in the mesh of fully_shard "
                "as well; give fully_shard the other axes only, such as mesh['dp'] of a mesh ('dp', 'tp')"
            )
        local_shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        return OuterShard(mesh, placement, tuple(parameter.shape), tuple(offset), tuple(local_shape))

    @property
    def is_repeated(self) -> bool:
        """True if another rank of the outer axis is the one that counts this part."""
        return isinstance(self.placement, Replicate) and self.mesh.get_local_rank() != 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the outer axis."""
        return self.mesh.get_group()

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a plain tensor of the global shape: a view."""
        for dim, (start, size) in enumerate(zip(self.offset, self.local_shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole

    def wrap(self, part: Tensor) -> DTensor:
        """The DTensor of which `part`, of the local shape, is this rank's shard."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, [self.placement], run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def part_of_gradient(self, gradient: Any) -> Tensor:
        """This rank's part of a gradient as autograd made it: sums still to be made over the outer axis are made."""
        if not isinstance(gradient, DTensor):
            raise ValueError(
                f"a gradient of a DTensor parameter came as a plain tensor of shape {tuple(gradient.shape)}"
            )
        if gradient.placements != (self.placement,):
            gradient = gradient.redistribute(placements=[self.placement])
        return gradient.to_local()


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter before `fully_shard`: the tensor itself, or a DTensor's shard."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def common_outer(outers: list[OuterShard | None]) -> OuterShard | None:
    """The one outer cut among several tensors', or None.

    Raises:
        NotImplementedError: they lie on different outer meshes.
    """
    found = [outer for outer in outers if outer is not None]
    if any(outer.mesh != found[0].mesh for outer in found):
        raise NotImplementedError("tensors on different outer meshes in one operation; treat mesh by mesh")
    return found[0] if found else None
