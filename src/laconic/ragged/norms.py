"""Norms of RaggedTensors over all dims or some. The norms of a list (`clip_grad_norm_`) share their messages."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.comm.collectives import all_reduce
from laconic.ragged.dtensor import all_reduce_outer
from laconic.ragged.reductions import arguments_of, dims_of, extrema, reduced, wide, without
from laconic.ragged.tensor import RaggedTensor, implements

aten = torch.ops.aten


def _norms(tensors: Mapping[int, RaggedTensor], order: float) -> dict[int, Tensor]:
    """The norms of tensors over one cluster, by the tensors' keys, in float32 or wider. Collective.

    Cost: one message for all tensors over the cluster, then one along each outer axis for the tensors that have it:
        [Note: Two parallelisms, two meshes] in ragged/dtensor.py.
    """
    _refuse_order(order)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for key, tensor in tensors.items():
        by_groups.setdefault(tensor.spec.outer_groups, []).append(key)
    keys = [key for own in by_groups.values() for key in own]
    first = tensors[keys[0]]
    # float32 at least: float16 cannot hold the square of 256, and bfloat16 sums have 8 significant bits only
    dtype = torch.promote_types(first.dtype, torch.float32)
    norms = torch.stack([_own_norm(tensors[key], order, dtype) for key in keys]).to(first.device)
    is_max = math.isinf(order)
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    norms = all_reduce(first.spec.cluster, norms if is_max else norms.pow(order), op)
    for groups, part in zip(by_groups, norms.split([len(own) for own in by_groups.values()]), strict=True):
        all_reduce_outer(groups, part, op)
    return dict(zip(keys, norms if is_max else norms.pow(1.0 / order), strict=True))


def _refuse_order(order: float) -> None:
    if order <= 0:
        raise NotImplementedError(f"a RaggedTensor has norms of positive order, got {order}; gather it: .full_tensor()")


def _own_norm(tensor: RaggedTensor, order: float, dtype: torch.dtype) -> Tensor:
    """The norm of this rank's part; zero if another rank counts the same elements."""
    dtensor = tensor.spec.dtensor
    if not tensor._local_tensor.numel() or (dtensor is not None and dtensor.is_replica):
        return tensor._local_tensor.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(tensor._local_tensor, order, dtype=dtype)


@implements(aten.linalg_vector_norm.default, aten.norm.Scalar)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source, order = (*args, 2.0)[:2]
    dims, keeps = dims_of(source, arguments_of(func, args, kwargs))
    if dims is not None:
        norms = without(_norms_over(source, float(order), dims), dims, keeps)
        return norms.to(kwargs.get("dtype") or source.dtype)
    norm = _norms({0: source}, float(order))[0]
    return (norm.view([1] * source.dim()) if keeps else norm).to(kwargs.get("dtype") or norm.dtype)


def _norms_over(tensor: RaggedTensor, order: float, dims: list[int]) -> Tensor:
    """The norms over some dims, which are kept, in float32 or wider. Cost: see `reduced`."""
    _refuse_order(order)
    if math.isinf(order):
        return extrema(tensor, dims, is_max=True, of_abs=True)
    dtype = wide(tensor.dtype)

    def of_box(box: Tensor, over: list[int], _: object) -> Tensor:
        return torch.linalg.vector_norm(box, order, over, keepdim=True, dtype=dtype).pow_(order)

    return reduced(tensor, dims, of_box, dtype=dtype).pow_(1.0 / order)


@implements(aten._foreach_norm.Scalar)
def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, order, dtype = args + (None, 2.0, kwargs.get("dtype"))[len(args) :]
    norms = dict[int, Tensor]()
    ragged = {position: tensor for position, tensor in enumerate(tensors) if isinstance(tensor, RaggedTensor)}
    for cluster in dict.fromkeys(tensor.spec.cluster for tensor in ragged.values()):
        norms |= _norms({i: tensor for i, tensor in ragged.items() if tensor.spec.cluster is cluster}, float(order))
    # parameters that fully_shard ignored: every rank has them whole, or as DTensors of torch's own
    for position in set(range(len(tensors))).difference(ragged):
        norm = torch.linalg.vector_norm(tensors[position], order, dtype=dtype)
        norms[position] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return [norms[position].to(dtype or norms[position].dtype) for position in range(len(tensors))]
