"""Reductions of RaggedTensors over all dims or some: sums, means, variances, extrema, norms, and questions.

The result is a plain tensor, equal on all ranks. Each rank reduces its own boxes, and the ranks reduce the results: as
many elements as the result has cross the wire, and no part of the tensor does. Sums are taken in float32 at least.

A rule of `_RULES` makes the result with the reduced dims kept, of element-wise operations and `reduced`. torch then
says the shape and the dtype: [Note: Asked of torch first] in ragged/dispatch.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.ragged.dispatch import arguments_of, implements, results_on_meta
from laconic.ragged.dtensor import all_reduce_outer
from laconic.ragged.tensor import RaggedTensor

aten = torch.ops.aten

_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {_SUM: torch.add, _MAX: torch.maximum, _MIN: torch.minimum}
_OfBox = Callable[[Tensor, list[int], torch.dtype], Tensor]
"""A function of (box, dims to reduce, dtype) to the reduced box, which keeps its dims."""
_OF_BOX: dict[Any, _OfBox] = {
    _SUM: lambda box, over, dtype: box.sum(over, keepdim=True, dtype=dtype),
    _MAX: lambda box, over, dtype: box.amax(over, keepdim=True),
    _MIN: lambda box, over, dtype: box.amin(over, keepdim=True),
}
_Dims = list[int] | None
"""The dims to reduce; None for all of them."""


def reduced(
    tensor: RaggedTensor,
    dims: _Dims,
    op: dist.ReduceOp.RedOpType = _SUM,
    *,
    dtype: torch.dtype,
    start: float = 0,
    of_box: _OfBox | None = None,
) -> Tensor:
    """Reduce `tensor` over `dims`, in `dtype`. Collective over the mesh and outer axes.

    `of_box` reduces one box, by default as `op` says. Without `dims` the box is flat. `start` is the result of no
    elements.

    Shapes: the shape of `tensor` with 1 in place of the size of each reduced dim.
    Cost: one all-reduce of the result over the cluster, and one along each outer axis, counted as "control".
    """
    spec, local = tensor.spec, tensor._local_tensor
    boxes, over = ([((0,), local)], [0]) if dims is None else (tensor.held_boxes(), dims)
    shape = [1] if dims is None else [1 if dim in over else size for dim, size in enumerate(tensor.shape)]
    result = local.new_full(shape, start, dtype=dtype)
    if spec.dtensor is not None and spec.dtensor.is_replica and op == _SUM:  # another rank counts the same elements
        boxes = []
    for offset, box in boxes:
        if box.numel():
            place = tuple(
                slice(0, 1) if dim in over else slice(begin, begin + size)
                for dim, (begin, size) in enumerate(zip(offset, box.shape, strict=True))
            )
            result[place] = _COMBINE[op](result[place], (of_box or _OF_BOX[op])(box, over, dtype))
    result = all_reduce(spec.cluster, result.to(spec.cluster.device), op)
    result = all_reduce_outer(spec.outer_groups, result, op).to(local.device)
    return result if dims else result.view([1] * tensor.dim())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ranks reduce: float32 or wider, or int64."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64


def _dims_of(tensor: Tensor, given: dict[str, Any]) -> _Dims:
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    chosen = sorted({dim % max(1, tensor.dim()) for dim in dims})
    return chosen if 0 < len(chosen) < tensor.dim() else None


def _num_reduced(tensor: Tensor, dims: _Dims) -> int:
    return math.prod(tensor.shape[dim] for dim in dims) if dims else tensor.numel()


def _sum(tensor: Any, dims: _Dims, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    return reduced(tensor, dims, dtype=dtype)


def _mean(tensor: Any, dims: _Dims, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    return reduced(tensor, dims, dtype=dtype).div_(_num_reduced(tensor, dims))


def _variance(tensor: Any, dims: _Dims, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    torch.empty(2, dtype=tensor.dtype).var()  # raises torch's error for dtypes without a variance
    correction = 1 if given["correction"] is None else given["correction"]
    squares = (tensor - _mean(tensor, dims, given, dtype)).square_()
    return reduced(squares, dims, dtype=dtype).div_(max(0, _num_reduced(tensor, dims) - correction))


def _extremum(
    tensor: Any, dims: _Dims, given: dict[str, Any], dtype: torch.dtype, *, op: dist.ReduceOp.RedOpType
) -> Tensor:
    """The maxima or minima. NaN wins, as in torch: backends differ in their maximum of NaN and a number."""
    if not tensor.numel():
        return (torch.max if op == _MAX else torch.min)(torch.empty(0))  # raises torch's error
    if not dtype.is_floating_point:
        worst = torch.iinfo(dtype).min if op == _MAX else torch.iinfo(dtype).max
        return reduced(tensor, dims, op, dtype=dtype, start=worst)
    has_nan = reduced(tensor.isnan(), dims, _MAX, dtype=torch.uint8)
    numbers = tensor.nan_to_num(0.0, math.inf, -math.inf)
    found = reduced(numbers, dims, op, dtype=dtype, start=-math.inf if op == _MAX else math.inf)
    return found.masked_fill_(has_nan > 0, math.nan)


def _question(
    tensor: Any, dims: _Dims, given: dict[str, Any], dtype: torch.dtype, *, op: dist.ReduceOp.RedOpType
) -> Tensor:
    # trunc_normal_ asks this about the values it draws, and every rank must draw equally often
    return reduced(tensor != 0, dims, op, dtype=torch.uint8, start=op == _MIN)


def _norm(tensor: Any, dims: _Dims, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    order = float(given["ord"] if "ord" in given else given["p"])
    if dims is None:
        return _norms([tensor], order)[0]
    _refuse_order(order)
    dtype = _wide(tensor.dtype)
    if math.isinf(order):
        return _extremum(tensor.abs(), dims, given, dtype, op=_MAX)

    def of_box(box: Tensor, over: list[int], dtype: torch.dtype) -> Tensor:
        return torch.linalg.vector_norm(box, order, over, keepdim=True, dtype=dtype).pow_(order)

    return reduced(tensor, dims, dtype=dtype, of_box=of_box).pow_(1.0 / order)


_RULES: dict[Any, Callable[..., Tensor]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: _variance,
    aten.std.correction: lambda *call: _variance(*call).sqrt_(),
    aten.max.default: partial(_extremum, op=_MAX),
    aten.amax.default: partial(_extremum, op=_MAX),
    aten.min.default: partial(_extremum, op=_MIN),
    aten.amin.default: partial(_extremum, op=_MIN),
    aten.any.default: partial(_question, op=_MAX),
    aten.any.dim: partial(_question, op=_MAX),
    aten.all.default: partial(_question, op=_MIN),
    aten.all.dim: partial(_question, op=_MIN),
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
}
"""Functions of (tensor, dims, arguments by name, dtype in which to reduce)."""


@implements(*_RULES)
def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = results_on_meta(func, args, kwargs)
    assert found is not None, f"torch has no shapes for {func}"
    like, tensor, given = found[0], args[0], arguments_of(func, args, kwargs)
    result = _RULES[func](tensor, _dims_of(tensor, given), given, _wide(like.dtype))
    return result.view(like.shape).to(tensor.device, like.dtype)


@implements(aten.allclose.default, aten.equal.default)
def _compare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second, *rest = args
    if func is aten.allclose.default:
        return bool(torch.isclose(first, second, *rest, **kwargs).all())
    return first.shape == second.shape and bool((first == second).all())


@implements(aten._foreach_norm.Scalar)
def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, order, dtype = args + (None, 2.0, kwargs.get("dtype"))[len(args) :]
    return [norm.to(dtype or norm.dtype) for norm in _norms(tensors, float(order), dtype)]


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norms of tensors; those of RaggedTensors in float32 or wider, others' in `dtype`. Collective.

    Cost: one message for all tensors over a cluster, then one along each outer axis for the tensors that have it:
        [Note: Two parallelisms, two meshes] in ragged/dtensor.py.
    """
    _refuse_order(order)
    norms: dict[int, Tensor] = {}
    by_cluster: dict[Cluster, dict[tuple[dist.ProcessGroup, ...], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, RaggedTensor):
            by_groups = by_cluster.setdefault(tensor.spec.cluster, {})
            by_groups.setdefault(tensor.spec.outer_groups, []).append(index)
        else:  # a parameter that fully_shard ignored: every rank has it whole, or as a DTensor of torch's own
            norm = torch.linalg.vector_norm(tensor, order, dtype=dtype)
            norms[index] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    is_max = math.isinf(order)
    op = _MAX if is_max else _SUM
    for cluster, by_groups in by_cluster.items():
        indices = [index for own in by_groups.values() for index in own]
        device, wide = tensors[indices[0]].device, torch.promote_types(tensors[indices[0]].dtype, torch.float32)
        found = torch.stack([_own_norm(tensors[index], order, wide) for index in indices]).to(device)
        found = all_reduce(cluster, found if is_max else found.pow(order), op)
        for groups, part in zip(by_groups, found.split(list(map(len, by_groups.values()))), strict=True):
            all_reduce_outer(groups, part, op)
        norms |= zip(indices, found if is_max else found.pow(1.0 / order), strict=True)
    return [norms[index] for index in range(len(tensors))]


def _refuse_order(order: float) -> None:
    if order <= 0:
        raise NotImplementedError(f"a RaggedTensor has norms of positive order, got {order}; gather it: .full_tensor()")


def _own_norm(tensor: Any, order: float, dtype: torch.dtype) -> Tensor:
    """The norm of this rank's part of a RaggedTensor; zero if another rank counts the same elements.

    It is taken in float32 at least: float16 cannot hold the square of 256, and bfloat16 sums have 8 significant bits.
    """
    dtensor = tensor.spec.dtensor
    if not tensor._local_tensor.numel() or (dtensor is not None and dtensor.is_replica):
        return tensor._local_tensor.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(tensor._local_tensor, order, dtype=dtype)
