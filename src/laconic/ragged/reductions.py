"""Reductions of RaggedTensors over all dims or some: sums, means, variances, extrema, norms, and questions.

The result is a plain tensor, equal on all ranks. Each rank reduces its own boxes, and the ranks reduce the results: as
many elements as the result has cross the wire, and no part of the tensor does. Sums are taken in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.comm.collectives import all_reduce
from laconic.ragged.dtensor import all_reduce_outer
from laconic.ragged.tensor import RaggedTensor, implements

aten = torch.ops.aten

_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_Place = tuple[slice, ...]
_BoxReduction = Callable[[Tensor, list[int], _Place], Tensor]
"""A function of (box, dims to reduce, place of the box in a result with these dims kept) to the reduced box."""


def reduced(
    tensor: RaggedTensor,
    dims: list[int] | None,
    of_box: _BoxReduction,
    *,
    op: dist.ReduceOp.RedOpType = _SUM,
    start: float = 0,
    dtype: torch.dtype,
) -> Tensor:
    """Reduce `tensor` over `dims`, which are some of `dims_of`; None for all. Collective over the mesh and outer axes.

    `of_box` reduces one box, in `dtype`, and keeps the dims. Without `dims` the box is flat. `start` is the result of
    no elements.

    Shapes: the shape of `tensor` with 1 in place of the size of each reduced dim.
    Cost: one all-reduce of the result over the cluster, and one along each outer axis, counted as "control".
    """
    spec, boxes = tensor.spec, [((0,), tensor._local_tensor)] if dims is None else tensor.held_boxes()
    over = [0] if dims is None else dims
    shape = [1] if dims is None else [1 if dim in over else size for dim, size in enumerate(tensor.shape)]
    result = torch.full(shape, start, dtype=dtype, device=tensor._local_tensor.device)
    if spec.dtensor is not None and spec.dtensor.is_replica and op == _SUM:  # another rank counts the same elements
        boxes = []
    for offset, box in boxes:
        if box.numel():
            place = tuple(
                slice(0, 1) if dim in over else slice(begin, begin + size)
                for dim, (begin, size) in enumerate(zip(offset, box.shape, strict=True))
            )
            _combine(op, result[place], of_box(box, over, place))
    result = all_reduce(spec.cluster, result.to(spec.cluster.device), op)
    result = all_reduce_outer(spec.outer_groups, result, op).to(tensor.device)
    return result if dims else result.view([1] * tensor.dim())


def _combine(op: dist.ReduceOp.RedOpType, total: Tensor, part: Tensor) -> None:
    if op == _SUM:
        total.add_(part)
    else:
        total.copy_(torch.maximum(total, part) if op == _MAX else torch.minimum(total, part))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ranks reduce: float32 or wider, or int64."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64


def without(result: Tensor, dims: list[int] | None, keeps: bool) -> Tensor:
    """Drop the reduced dims, which have size 1, unless `keeps`."""
    if keeps:
        return result
    return result.squeeze(tuple(dims)) if dims else result.view(())


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an aten function by name, with defaults."""
    return {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(func._schema.arguments)
    }


def dims_of(tensor: Tensor, given: dict[str, Any]) -> tuple[list[int] | None, bool]:
    """The dims of a call, None for all of `tensor`, and whether it keeps them."""
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    chosen = sorted({dim % max(1, tensor.dim()) for dim in dims})
    return chosen if 0 < len(chosen) < tensor.dim() else None, bool(given.get("keepdim"))


def _num_reduced(tensor: Tensor, dims: list[int] | None) -> int:
    return math.prod(tensor.shape[dim] for dim in dims) if dims else tensor.numel()


def _sums(tensor: RaggedTensor, dims: list[int] | None, dtype: torch.dtype) -> Tensor:
    return reduced(tensor, dims, lambda box, over, _: box.sum(over, keepdim=True, dtype=dtype), dtype=dtype)


@implements(aten.sum.default, aten.sum.dim_IntList, asks_torch=True)
def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = arguments_of(func, args, kwargs)
    tensor, (dims, keeps) = args[0], dims_of(args[0], given)
    dtype = given["dtype"] or (tensor.dtype if tensor.is_floating_point() else torch.int64)
    return without(_sums(tensor, dims, wide(dtype)), dims, keeps).to(dtype)


@implements(aten.mean.default, aten.mean.dim, asks_torch=True)
def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = arguments_of(func, args, kwargs)
    tensor, (dims, keeps) = args[0], dims_of(args[0], given)
    dtype = given["dtype"] or tensor.dtype
    torch.empty(1, dtype=dtype).mean()  # raises torch's error for dtypes without a mean
    return without(_means(tensor, dims, wide(dtype)), dims, keeps).to(dtype)


def _means(tensor: RaggedTensor, dims: list[int] | None, dtype: torch.dtype) -> Tensor:
    return _sums(tensor, dims, dtype).div_(_num_reduced(tensor, dims))


@implements(aten.var.correction, aten.std.correction, asks_torch=True)
def _var_or_std(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = arguments_of(func, args, kwargs)
    tensor, (dims, keeps) = args[0], dims_of(args[0], given)
    dtype = wide(tensor.dtype)
    torch.empty(2, dtype=tensor.dtype).var()  # raises torch's error for dtypes without a variance
    means = _means(tensor, dims, dtype)
    if not dims:
        means = means.view(1)  # as boxes are flat then

    def of_box(box: Tensor, over: list[int], place: _Place) -> Tensor:
        return (box - means[place]).square_().sum(over, keepdim=True)

    correction = 1 if given["correction"] is None else given["correction"]
    variance = reduced(tensor, dims, of_box, dtype=dtype)
    variance.div_(max(0, _num_reduced(tensor, dims) - correction))
    return without(variance.sqrt_() if func is aten.std.correction else variance, dims, keeps).to(tensor.dtype)


@implements(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default, asks_torch=True)
def _max_or_min(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, (dims, keeps) = args[0], dims_of(args[0], arguments_of(func, args, kwargs))
    if not _num_reduced(tensor, dims):
        return func(tensor.full_tensor(), *args[1:], **kwargs)  # torch's own error
    is_max = func in (aten.max.default, aten.amax.default)
    return without(extrema(tensor, dims, is_max=is_max), dims, keeps).to(tensor.dtype)


def extrema(tensor: RaggedTensor, dims: list[int] | None, *, is_max: bool, of_abs: bool = False) -> Tensor:
    """The maxima or minima over `dims`, in the `wide` dtype, with the dims kept. NaN wins, as in torch. Collective."""
    dtype = wide(tensor.dtype)
    worst = math.inf if dtype.is_floating_point else torch.iinfo(dtype).max

    def of_box(box: Tensor, over: list[int], _: _Place) -> Tensor:
        box = box.abs().to(dtype) if of_abs else box.to(dtype)
        return (box.amax if is_max else box.amin)(over, keepdim=True)

    if not dtype.is_floating_point:
        start = torch.iinfo(dtype).min if is_max else worst
        return reduced(tensor, dims, of_box, op=_MAX if is_max else _MIN, start=start, dtype=dtype)
    is_nan = reduced(  # backends differ in their maximum of NaN and a number
        tensor, dims, lambda box, over, _: box.isnan().to(dtype).amax(over, keepdim=True), op=_MAX, dtype=dtype
    )
    found = reduced(
        tensor,
        dims,
        lambda box, over, place: of_box(box.nan_to_num(0.0, math.inf, -math.inf), over, place),
        op=_MAX if is_max else _MIN,
        start=-worst if is_max else worst,
        dtype=dtype,
    )
    return found.masked_fill_(is_nan > 0, math.nan)


@implements(aten.any.default, aten.all.default, aten.any.dim, aten.all.dim, asks_torch=True)
def _any_or_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # trunc_normal_ asks this about the values it draws, and every rank must draw equally often
    tensor, (dims, keeps) = args[0], dims_of(args[0], arguments_of(func, args, kwargs))
    is_any = func in (aten.any.default, aten.any.dim)

    def of_box(box: Tensor, over: list[int], _: _Place) -> Tensor:
        box = (box != 0).to(torch.uint8)
        return (box.amax if is_any else box.amin)(over, keepdim=True)

    answers = reduced(tensor, dims, of_box, op=_MAX if is_any else _MIN, start=not is_any, dtype=torch.uint8)
    return without(answers, dims, keeps).to(torch.bool)


@implements(aten.allclose.default, aten.equal.default)
def _compare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second, *rest = args
    if func is aten.allclose.default:
        return bool(torch.isclose(first, second, *rest, **kwargs).all())
    return first.shape == second.shape and bool((first == second).all())


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


@implements(aten.linalg_vector_norm.default, aten.norm.Scalar, asks_torch=True)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source, order = (*args, 2.0)[:2]
    dims, keeps = dims_of(source, arguments_of(func, args, kwargs))
    if dims is not None:
        norms = without(_norms_over(source, float(order), dims), dims, keeps)
        return norms.to(kwargs.get("dtype") or source.dtype)
    norm = _norms({0: source}, float(order))[0]
    return (norm.view([1] * source.dim()) if keeps else norm).to(kwargs.get("dtype") or source.dtype)


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
