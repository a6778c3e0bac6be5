"""What a RaggedTensor can do: element-wise operations on local parts, norms over the mesh, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.ragged.dtensor import OuterShard, common_outer
from laconic.ragged.tensor import RaggedSpec, RaggedTensor

aten = torch.ops.aten

_ALLOCATIONS = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.clone.default,
    aten._to_copy.default,
}
_FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
_RANDOM_FILLS = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
}
_SIZED_ALLOCATIONS = {
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
}
# Element by element though not tagged so: lists of tensors, and the fused optimizers.
_ELEMENTWISE_PREFIXES = ("_foreach_", "_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
_ELEMENTWISE_UNTAGGED = {aten.lerp_.Scalar, aten.lerp_.Tensor, aten.nan_to_num_.default}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, at least one of whose arguments is a RaggedTensor (or a norm of one that is still partial)."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if _is_elementwise(func):
        return _elementwise(func, args, kwargs)
    raise NotImplementedError(
        f"{func} is not defined on a RaggedTensor, of which this rank holds only a part. Use .to_local() for this "
        "rank's elements, .full_tensor() for all of them, or call the sharded module, which gathers its parameters"
    )


@cache
def _is_elementwise(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return (
        torch.Tag.pointwise in func.tags
        or func in _ALLOCATIONS | _FILLS | _ELEMENTWISE_UNTAGGED
        or (name.startswith(_ELEMENTWISE_PREFIXES) and "norm" not in name and name != "_foreach_max")
    )


@cache
def _mutated(func: Any) -> tuple[str | int, ...]:
    """Positions, or names if keyword-only, of the arguments that `func` changes."""
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    specs = _specs_by_position(args, kwargs)
    local_args, local_kwargs = _localize((args, kwargs), specs)
    result = func(*local_args, **local_kwargs)
    changed = _bump_changed(func, args, kwargs)
    if changed:  # in place: as the schema says, the changed argument itself or, for lists, nothing
        return changed[0] if func._schema.returns else None
    return _wrap(result, specs)


def _specs_by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RaggedSpec]:
    """The layouts of the operands: one, or one per list position of a foreach operation."""
    lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
    if lists:
        columns: Iterable[tuple[Any, ...]] = zip(
            *(entry for entry in lists if len(entry) == len(lists[0])), strict=True
        )
    else:
        columns = [tuple(tree_leaves((args, kwargs)))]
    specs = []
    for column in columns:
        ragged = [value for value in column if isinstance(value, RaggedTensor)]
        if not ragged:
            raise ValueError(
                "an element-wise list operation got a position without a RaggedTensor; split the list first"
            )
        spec = ragged[0]._spec
        for other in ragged[1:]:
            if other._spec is not spec and other._spec != spec:
                raise ValueError(
                    f"element-wise operation on RaggedTensors that are cut differently: {spec.shape} as slot "
                    f"{spec.index} and {other._spec.shape} as slot {other._spec.index} of different layouts; gather "
                    "one with .full_tensor()"
                )
        specs.append(spec)
    return specs


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(item, Tensor) for item in value)


def _localize(tree: Any, specs: list[RaggedSpec]) -> Any:
    """Replace every RaggedTensor by its local part, and plain tensors of the global shape by this rank's part."""

    def of(value: Any, spec: RaggedSpec) -> Any:
        if isinstance(value, RaggedTensor):
            return value._local
        if isinstance(value, Tensor) and value.numel() != 1:
            if tuple(value.shape) != spec.shape:
                raise ValueError(
                    f"element-wise operation between a RaggedTensor of shape {spec.shape} and a tensor of shape "
                    f"{tuple(value.shape)}: shapes must be equal, broadcasting over a cut tensor is not supported"
                )
            return spec.part_of(value)
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.reshape(1)  # broadcasts over the flat local part, whatever the global shape
        return value

    def visit(value: Any) -> Any:
        if _is_tensor_list(value) and len(value) == len(specs):
            return [of(item, spec) for item, spec in zip(value, specs, strict=True)]
        if isinstance(value, (list, tuple)):
            return type(value)(visit(item) for item in value)
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        return of(value, specs[0])

    return visit(tree)


def _bump_changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Record changes ([Note: Versions]); returns the arguments that `func` changes."""
    changed = [
        args[position] if isinstance(position, int) and position < len(args) else kwargs.get(str(position))
        for position in _mutated(func)
    ]
    for tensor in tree_leaves(changed):
        if isinstance(tensor, RaggedTensor) and tensor._bump is not None:
            tensor._bump()
    return changed


def _wrap(result: Any, specs: list[RaggedSpec]) -> Any:
    if isinstance(result, Tensor):
        return RaggedTensor(result, specs[0])
    if isinstance(result, (list, tuple)):
        return [RaggedTensor(item, spec) for item, spec in zip(result, specs, strict=True)]
    return result


# -- operations with rules of their own --------------------------------------------------------------------------------


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    # The same local part and the same bump: `p.data` and `p.detach()` edit the parameter, and are seen to.
    source: RaggedTensor = args[0]
    return RaggedTensor(source._local, source._spec, device=source.device, bump=source._bump)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, RaggedTensor):
        raise NotImplementedError("cannot copy a RaggedTensor into a plain tensor; use .full_tensor() or .to_local()")
    if isinstance(source, RaggedTensor) and source._spec != target._spec:
        source = source.full_tensor()
    return _elementwise(func, (target, source, *args[2:]), kwargs)


def _random_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    target: RaggedTensor = args[0]
    if target._local.is_meta:
        return target
    whole = torch.empty(target.shape, dtype=target.dtype, device=target._local.device)
    func(whole, *args[1:], **kwargs)
    target._local.copy_(target._spec.part_of(whole))
    _bump_changed(func, args, kwargs)
    return target


def _any_or_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # trunc_normal_ asks this of the values it draws; every rank must draw as often.
    source: RaggedTensor = args[0]
    answer = func(source._local).to(torch.uint8)
    op = dist.ReduceOp.MAX if func is aten.any.default else dist.ReduceOp.MIN
    return _reduce_everywhere(answer, source._spec.cluster, source._spec.outer, op).to(torch.bool)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    source, dim, index = args
    if dim % source.dim() != 0:
        raise NotImplementedError(f"only whole rows of a RaggedTensor can be selected (dim 0), not dim {dim}")
    index %= source.shape[0]
    return source.rows(index, index + 1, keep_dim=False)


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    source: RaggedTensor = args[0]
    defaults = (0, None, None, 1)
    dim, start, stop, step = args[1:] + defaults[len(args) - 1 :]
    size = source.shape[0]
    if dim != 0 or step != 1:
        raise NotImplementedError(
            f"only whole rows of a RaggedTensor can be sliced (dim 0, step 1), not dim {dim}, step {step}"
        )
    begin, end, _ = slice(start, stop).indices(size)
    return source.rows(begin, max(begin, end), keep_dim=True)


def _sized_allocation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, size, *rest = args
    if tuple(size) != tuple(source.shape):
        return func(source._local, *args[1:], **kwargs)
    local = source._local
    if func is aten.new_empty_strided.default:
        return source.like(aten.new_empty.default(local, [local.numel()], **kwargs))
    return source.like(func(local, [local.numel()], *rest, **kwargs))


def _scaled_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source = args[0]
    order = float(args[1]) if len(args) > 1 else 2.0
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    if dims is not None and len(dims) not in (0, source.dim()):
        raise NotImplementedError(f"a RaggedTensor has norms over all its elements only, not over dims {dims}")
    if isinstance(source, PartialNorm):
        return source.combine(order)
    return PartialNorm.of([source], order, shape=())


def _norm_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _scaled_norm(aten.linalg_vector_norm.default, (args[0], *args[1:2]), {})


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = float(args[1]) if len(args) > 1 else 2.0
    by_cluster: dict[Cluster, list[int]] = {}
    for position, tensor in enumerate(args[0]):
        by_cluster.setdefault(tensor._spec.cluster, []).append(position)
    norms: dict[int, Tensor] = {}
    for positions in by_cluster.values():
        totals = PartialNorm.of([args[0][i] for i in positions], order, shape=(len(positions),)).reduced()
        norms.update(zip(positions, totals.unbind(), strict=True))
    return [norms[position] for position in range(len(args[0]))]


def _unscale_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # GradScaler: every rank must skip the step that any rank must skip.
    tensors, found_inf, scale = args
    func([tensor._local for tensor in tensors], found_inf, scale)
    for cluster, outer in dict.fromkeys((tensor._spec.cluster, tensor._spec.outer) for tensor in tensors):
        _reduce_everywhere(found_inf, cluster, outer, dist.ReduceOp.MAX)


def _reduce_everywhere(
    tensor: Tensor, cluster: Cluster, outer: OuterShard | None, op: dist.ReduceOp.RedOpType
) -> Tensor:
    """Reduce a small tensor, in place, over the mesh and over the axis of another parallelism."""
    all_reduce(cluster, tensor, op)
    if outer is not None:
        dist.all_reduce(tensor, op, group=outer.group)
    return tensor


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.copy_.default: _copy_,
    aten.linalg_vector_norm.default: _scaled_norm,
    aten.norm.Scalar: _norm_scalar,
    aten.any.default: _any_or_all,
    aten.all.default: _any_or_all,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_,
    **dict.fromkeys(_RANDOM_FILLS, _random_fill),
    **dict.fromkeys(_SIZED_ALLOCATIONS, _sized_allocation),
}


class PartialNorm(torch.Tensor):
    """Norms of which this rank knows only its own part; reduced over the mesh when somebody looks.

    `clip_grad_norm_` takes the norm of each gradient, stacks them and takes the norm of the stack. Reducing at the end
    makes that one message instead of one per parameter.
    """

    _powers: Tensor
    _order: float
    _cluster: Cluster
    _outer: OuterShard | None

    @staticmethod
    def __new__(cls, powers: Tensor, order: float, cluster: Cluster, outer: OuterShard | None) -> PartialNorm:
        """`powers`: this rank's sums of |x| ** order, or maxima for the infinite order, also summed over `outer`."""
        self = torch.Tensor._make_wrapper_subclass(cls, powers.shape, dtype=powers.dtype, device=powers.device)
        self._powers, self._order, self._cluster, self._outer = powers, order, cluster, outer
        return self

    @staticmethod
    def of(tensors: list[RaggedTensor], order: float, *, shape: tuple[int, ...]) -> PartialNorm:
        """The partial norms of `tensors`, one each, all on one mesh."""
        if order <= 0:
            raise NotImplementedError(f"a RaggedTensor has norms of positive order, got {order}")
        # In fp32 at least: the square of a norm of 256 is beyond fp16, and bf16 would add squares with 8 bits.
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        outer = common_outer([tensor._spec.outer for tensor in tensors])
        norms = [
            torch.linalg.vector_norm(tensor._local, order, dtype=dtype)
            if tensor._local.numel() and _counts(tensor._spec.outer, outer)
            else tensor._local.new_zeros((), dtype=dtype)
            for tensor in tensors
        ]
        powers = torch.stack(norms)
        if not math.isinf(order):
            powers = powers.pow(order)
        return PartialNorm(powers.view(shape).to(tensors[0].device), order, tensors[0]._spec.cluster, outer)

    @staticmethod
    def stacked(norms: list[PartialNorm]) -> PartialNorm:
        """Several on one mesh as one."""
        outer = common_outer([norm._outer for norm in norms])
        powers = [norm._powers if _counts(norm._outer, outer) else torch.zeros_like(norm._powers) for norm in norms]
        return PartialNorm(torch.stack(powers), norms[0]._order, norms[0]._cluster, outer)

    def reduced(self, combine: bool = False) -> Tensor:
        """The norms as a plain tensor, or with `combine` the norm of them all. Collective."""
        infinite = math.isinf(self._order)
        powers = self._powers.clone()
        if combine:
            powers = powers.amax() if infinite else powers.sum()
        op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        _reduce_everywhere(powers, self._cluster, self._outer, op)
        return powers if infinite else powers.pow(1.0 / self._order)

    def combine(self, order: float) -> Tensor:
        """The norm of these norms."""
        if order == self._order:
            return self.reduced(combine=True)
        return torch.linalg.vector_norm(self.reduced(), order)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # `kwargs` may be None, whatever the stub says
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.linalg_vector_norm.default:
            return _scaled_norm(func, args, kwargs)
        if func is aten.detach.default:
            return PartialNorm(args[0]._powers, args[0]._order, args[0]._cluster, args[0]._outer)
        if func is aten.stack.default:
            norms = args[0]
            kinds = {(norm._cluster, norm._order) if isinstance(norm, PartialNorm) else None for norm in norms}
            if len(kinds) == 1 and None not in kinds:
                return PartialNorm.stacked(norms)
        args, kwargs = tree_map(lambda leaf: leaf.reduced() if isinstance(leaf, PartialNorm) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _counts(own: OuterShard | None, outer: OuterShard | None) -> bool:
    """False for what other ranks of the outer axis hold too, on all of them but one."""
    if outer is None:
        return True
    return not own.is_repeated if own is not None else outer.mesh.get_local_rank() == 0
