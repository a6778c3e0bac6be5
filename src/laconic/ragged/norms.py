"""Norms of RaggedTensors over the mesh. The norms of a list (`clip_grad_norm_` with foreach) cost one message.

A norm over some dims gathers the tensor, since a rank's run begins and ends inside the elements that one norm takes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic.ragged.dtensor import DTensorShard, all_reduce_both, common_mesh
from laconic.ragged.tensor import RaggedTensor, implements

aten = torch.ops.aten


def _norms(tensors: Sequence[RaggedTensor], order: float) -> Tensor:
    """The norms of tensors over one cluster, (number of tensors,), in float32 or wider. Collective."""
    if order <= 0:
        raise NotImplementedError(f"a RaggedTensor has norms of positive order, got {order}")
    # float32 at least: float16 cannot hold the square of 256, and bfloat16 sums have 8 significant bits only
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    mesh = common_mesh(tensor.spec.dtensor_mesh for tensor in tensors)
    own = [
        torch.linalg.vector_norm(tensor._local_tensor, order, dtype=dtype)
        if tensor._local_tensor.numel() and _is_counted_here(tensor.spec.dtensor, mesh)
        else tensor._local_tensor.new_zeros((), dtype=dtype)
        for tensor in tensors
    ]
    norms = torch.stack(own).to(tensors[0].device)
    cluster = tensors[0].spec.cluster
    if math.isinf(order):
        return all_reduce_both(norms, cluster, mesh, dist.ReduceOp.MAX)
    return all_reduce_both(norms.pow(order), cluster, mesh, dist.ReduceOp.SUM).pow(1.0 / order)


def _is_counted_here(dtensor: DTensorShard | None, mesh: DeviceMesh | None) -> bool:
    """False if another rank of the DTensor mesh counts the same elements."""
    if dtensor is not None:
        return not dtensor.is_replica
    return mesh is None or mesh.get_local_rank() == 0


def _order_of(args: tuple[Any, ...]) -> float:
    return float(args[1]) if len(args) > 1 else 2.0


@implements(aten.linalg_vector_norm.default, aten.norm.Scalar)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source, order, dims, keeps_dims = args + (None, 2.0, None, False)[len(args) :]  # torch leaves out trailing defaults
    if keeps_dims or (dims and len(dims) < source.dim()):
        return func(source.full_tensor(), *args[1:], **kwargs)
    norm = _norms([source], float(order))[0]
    return norm.to(kwargs.get("dtype") or norm.dtype)


@implements(aten._foreach_norm.Scalar)
def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, norms = args[0], dict[int, Tensor]()
    ragged = [position for position, tensor in enumerate(tensors) if isinstance(tensor, RaggedTensor)]
    for cluster in dict.fromkeys(tensors[position].spec.cluster for position in ragged):
        positions = [position for position in ragged if tensors[position].spec.cluster is cluster]
        norms |= zip(positions, _norms([tensors[i] for i in positions], _order_of(args)), strict=True)
    # parameters that fully_shard ignored: every rank has them whole, or as DTensors of torch's own
    for position in set(range(len(tensors))).difference(ragged):
        norm = torch.linalg.vector_norm(tensors[position], _order_of(args), dtype=kwargs.get("dtype"))
        norms[position] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return [norms[position] for position in range(len(tensors))]
