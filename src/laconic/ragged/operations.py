"""Operations on RaggedTensors: element-wise ones on local parts, random fills and allocations."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from laconic import _compat
from laconic.comm.collectives import all_reduce
from laconic.layout.bucket import boxes
from laconic.ragged import indexing as indexing  # registers its handlers
from laconic.ragged import reductions as reductions  # likewise
from laconic.ragged.dispatch import Handler, handlers, implements, remedy_for, results_on_meta
from laconic.ragged.dtensor import all_reduce_outer, is_torch_dtensor, whole_of
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

aten = torch.ops.aten

# These functions are element-wise, though torch does not tag them so.
_ALLOCATIONS = {"zeros_like", "ones_like", "empty_like", "full_like", "clone", "_to_copy"}
_UNTAGGED = {"zero_", "fill_", "lerp_", "nan_to_num_", "masked_fill_", "isclose"}
_ZERO = {aten.zero_.default, aten._foreach_zero_.default}
_NUMBERS = (int, float, complex, type(None))
_KEYWORDS = {"value", "alpha", "rounding_mode", "dtype"}
"""The keyword-only arguments that are no tensors, and say nothing of a layout."""
_FUSED_STEPS = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
_REDUCING = {"_foreach_max"}
"""Functions on lists that reduce each tensor, though the function of this name on two tensors is element-wise."""


@cache
def _is_elementwise(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return name not in _REDUCING and _is_pointwise(name.removeprefix("_foreach_").removesuffix("_"))
    return torch.Tag.pointwise in func.tags or name in _ALLOCATIONS | _UNTAGGED or name.startswith(_FUSED_STEPS)


def _is_pointwise(name: str) -> bool:
    """True if a function on a single tensor is element-wise, or fills it."""
    packet = getattr(aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return name in ("zero", "copy", "clone", "lerp") or any(torch.Tag.pointwise in each.tags for each in overloads)


def _handler_of(func: Any) -> Handler:
    if _is_elementwise(func):
        return _elementwise(func)
    return _decompose if _compat.is_composite(func) else _refuse


handlers.of_others = _handler_of


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)  # in inference mode, where nothing has done so before


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, RaggedTensor))
    raise NotImplementedError(
        f"{func} is not defined on a RaggedTensor, of which this rank holds only a part: {given.spec.slot.name}, "
        f"{tuple(given.shape)}. {remedy_for(func)}"
    )


@cache
def _elementwise(func: Any) -> Handler:
    """Run an element-wise function: at once where all operands are of one cut or numbers, as in optimizers' steps."""
    changed = _changed_arguments(func)
    is_plain, is_in_place, zeroes = changed in ((), (0,)), changed == (0,), func in _ZERO

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec: RaggedSpec | None = None
        own: list[Any] = []
        for operand in args:
            if isinstance(operand, RaggedTensor):
                if spec is None:
                    spec = operand.spec
                elif operand.spec is not spec:
                    return _of_mixed_operands(func, args, kwargs)
                own.append(operand._local_tensor)
            elif isinstance(operand, _NUMBERS):
                own.append(operand)
            else:
                return _of_mixed_operands(func, args, kwargs)
        if spec is None or not is_plain or not kwargs.keys() <= _KEYWORDS:
            return _of_mixed_operands(func, args, kwargs)
        result = func(*own, **kwargs)
        if is_in_place:
            target = args[0]
            if target._bump is not None:
                target._bump()
            if zeroes:
                target.note_zeroing()
            return target
        return (
            RaggedTensor(result, spec) if isinstance(result, Tensor) else [RaggedTensor(each, spec) for each in result]
        )

    return run


def _of_mixed_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    specs = _specs_of_lists(values)
    if specs is not None:
        own = list(map(_local_list, values))
    else:
        changed = _changed(func, args, kwargs)
        specs = [_spec_of(func, operands, targets) for operands, targets in _positions(values, changed)]
        if not all(isinstance(each, RaggedTensor | float | int) for each in values):
            _refuse_other_shapes(func, args, kwargs, specs)
        own = [_localize(value, specs) for value in values]
    own_kwargs = dict(zip(kwargs, own[len(args) :], strict=True))
    own_kwargs.pop("memory_format", None)  # parts are flat
    result = func(*own[: len(args)], **own_kwargs)
    changed = _note_changes(func, args, kwargs)
    if changed:  # as the schema says, functions in place return their argument or, for lists, nothing
        return changed[0] if func._schema.returns else None
    if isinstance(result, (list, tuple)):
        specs = [*specs] * (len(result) // len(specs))  # one function of a tensor may have several results
        return [item if spec is None else RaggedTensor(item, spec) for item, spec in zip(result, specs, strict=True)]
    return RaggedTensor(result, specs[0]) if isinstance(result, Tensor) and specs[0] is not None else result


def _refuse_other_shapes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[RaggedSpec | None]
) -> None:
    """Let torch raise its errors, and refuse results of other shapes: [Note: Asked of torch first] in dispatch.py."""
    results = results_on_meta(func, args, kwargs)
    own = specs[0].shape if len(specs) == 1 and specs[0] is not None else None
    shapes = [tuple(each.shape) for each in results or () if isinstance(each, Tensor)]
    if own is not None and any(shape != own for shape in shapes):
        raise ValueError(
            f"{func} would repeat a RaggedTensor of shape {own} to {shapes[0]}: a cut tensor is not repeated; gather "
            "it with .full_tensor()"
        )


def _specs_of_lists(values: Sequence[Any]) -> Sequence[RaggedSpec | None] | None:
    """The layouts of the operands by position if they are lists of nothing but RaggedTensors, cut by the same specs.

    The steps of optimizers call functions on such lists, with thousands of tensors. None: the operands are others.
    """
    specs: list[RaggedSpec] | None = None
    for value in values:
        if not isinstance(value, (list, tuple)):
            if isinstance(value, Tensor) and value.dim() > 0:
                return None
        elif len(value) > 0 and set(map(type, value)) == {RaggedTensor}:
            found = [item.spec for item in value]
            if specs is None:
                specs = found
            elif len(found) != len(specs) or any(map(operator.is_not, found, specs)):
                return None
        elif [item for item in value if isinstance(item, Tensor) and item.dim() > 0]:
            return None
    return specs


def _local_list(value: Any) -> Any:
    """Replace a list of RaggedTensors by their local parts."""
    if isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], RaggedTensor):
        return [item._local_tensor for item in value]
    return value


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(item, Tensor) for item in value)


def _positions(values: Sequence[Any], changed: Sequence[Any]) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """The operands that meet, and those of them that change: all, or for a foreach function one of each of its lists.

    A plain number in a list counts the steps of an optimizer, and is not among those that change.
    """
    lists = [value for value in values if _is_tensor_list(value)]
    if not lists:
        yield values, changed
        return
    lists = [each for each in lists if len(each) == len(lists[0])]
    are_changed = [any(each is one for one in changed) for each in lists]
    for operands in zip(*lists, strict=True):
        yield operands, [each for each in compress(operands, are_changed) if each.dim() > 0]


def _spec_of(func: Any, operands: Sequence[Any], targets: Sequence[Any]) -> RaggedSpec | None:
    """The layout that the RaggedTensors among `operands` have. None: the call is one on whole tensors.

    It is, if there are no RaggedTensors, as of parameters that `fully_shard` ignored; or if one of the `targets` that
    it changes is a plain tensor, of which it changes all elements.

    Raises:
        ValueError: RaggedTensors are cut differently, or are changed together with whole plain tensors.
    """
    ragged = [each for each in operands if isinstance(each, RaggedTensor)]
    if not ragged:
        return None
    if any(isinstance(each, Tensor) and not isinstance(each, RaggedTensor) for each in targets):
        for each in targets:
            if isinstance(each, RaggedTensor):
                raise ValueError(
                    f"{func} changes a RaggedTensor of shape {tuple(each.shape)} together with whole plain tensors; "
                    "cut these alike, with torch.empty_like(ragged).copy_(whole)"
                )
        return None
    spec = ragged[0].spec
    for other in (each.spec for each in ragged):
        if other is not spec and other != spec:
            raise ValueError(
                f"element-wise operation on RaggedTensors that are cut differently: {spec.shape} as slot {spec.index} "
                f"and {other.shape} as slot {other.index} of different layouts; gather one with .full_tensor()"
            )
    return spec


def _localize(value: Any, specs: Sequence[RaggedSpec | None]) -> Any:
    """Replace RaggedTensors by their local parts, and plain tensors of the global shape by this rank's parts."""
    if _is_tensor_list(value) and len(value) == len(specs):
        return [_local(item, spec) for item, spec in zip(value, specs, strict=True)]
    return [_localize(item, specs) for item in value] if isinstance(value, (list, tuple)) else _local(value, specs[0])


def _local(value: Any, spec: RaggedSpec | None) -> Any:
    """This rank's part of an operand; without `spec` its whole."""
    if isinstance(value, RaggedTensor):
        return value.full_tensor() if spec is None else value._local_tensor
    if spec is None or not isinstance(value, Tensor):
        return value
    if is_torch_dtensor(value):
        value = _whole_operand(value)
    if value.dim() == 0:
        return value
    if value.numel() == 1:
        return value.reshape(1)  # broadcasts over the flat local part, whatever the global shape
    if tuple(value.shape) == spec.shape:
        return spec.part_of(value)
    whole = value.expand(spec.shape)  # which is never made
    if spec.dtensor is not None:
        return spec.part_of(whole)
    held = boxes(spec.shape, spec.held)
    places = [tuple(slice(b, b + size) for b, size in zip(begins, sizes, strict=True)) for begins, sizes in held]
    return torch.cat([whole[place].reshape(-1) for place in places]) if places else value.new_empty(0)


def _whole_operand(operand: DTensor) -> Tensor:
    """The whole of a DTensor operand; only if that is a number or lies on every rank, as nobody expects a gather."""
    if operand.numel() == 1 or all(placement.is_replicate() for placement in operand.placements):
        return whole_of(operand)
    raise ValueError(
        f"an operation mixes a RaggedTensor with a DTensor that is cut as {operand.placements}; cut one as the other, "
        "with torch.empty_like(ragged).copy_(dtensor), or gather both with .full_tensor()"
    )


@cache
def _changed_arguments(func: Any) -> tuple[str | int, ...]:
    """Positions of the arguments that `func` changes in place, or names if they are keyword-only."""
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that `func` changes in place."""
    return [
        args[place] if isinstance(place, int) and place < len(args) else kwargs.get(str(place))
        for place in _changed_arguments(func)
    ]


def _note_changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Bump versions ([Note: Versions] in ragged/tensor.py); return the arguments that `func` changes in place."""
    changed = _changed(func, args, kwargs)
    lists = [value if isinstance(value, (list, tuple)) else (value,) for value in changed]
    ragged = [tensor for tensors in lists for tensor in tensors if isinstance(tensor, RaggedTensor)]
    for bump in {tensor._bump for tensor in ragged}:  # parameters of a bucket share theirs
        if bump is not None:
            bump()
    for tensor in ragged if func in _ZERO else ():
        tensor.note_zeroing()
    return changed


@implements(aten.detach, aten.alias)
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    return args[0].alias()


@implements(aten.copy_)
def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, RaggedTensor):
        raise NotImplementedError(
            f"cannot copy {source.spec.slot.name}, a RaggedTensor, into a plain tensor. {remedy_for(func)}"
        )
    if is_torch_dtensor(source):
        source = whole_of(source)
    elif isinstance(source, RaggedTensor) and source.spec != target.spec:
        source = source.full_tensor()
    return _elementwise(func)(func, (target, source, *args[2:]), kwargs)


@implements(aten.normal_, aten.uniform_, aten.bernoulli_, aten.exponential_, aten.random_)
@implements(aten.cauchy_, aten.log_normal_, aten.geometric_)
@implements(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
@implements(aten.bernoulli.default, aten.bernoulli.p)
def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    """Draw the whole tensor, as every rank does, and keep this rank's part."""
    source: RaggedTensor = args[0]
    local = source._local_tensor
    kwargs.pop("memory_format", None)  # parts are flat
    given = source.full_tensor() if func is aten.bernoulli.default else local.new_empty(source.shape)
    drawn = source.spec.part_of(func(given, *args[1:], **kwargs))
    if not func._schema.is_mutable:
        return source.like(drawn.clone())
    local.copy_(drawn)
    source.note_change()
    return source


@implements(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source, size, *rest = args
    local = source._local_tensor
    if tuple(size) != tuple(source.shape):
        return func(local, size, *rest, **kwargs)
    if func is aten.new_empty_strided.default:
        func, rest = aten.new_empty.default, []
    return source.like(func(local, [local.numel()], *rest, **kwargs))


@implements(aten.mm.default)
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    first, second = args
    scale, tensor = (first, second) if isinstance(second, RaggedTensor) else (second, first)
    if scale.numel() == 1 and tuple(scale.shape) == (1, 1):  # Adafactor's product of a row's and a column's factors
        return tensor * scale
    return _handler_of(func)(func, args, kwargs)


@implements(aten._amp_foreach_non_finite_check_and_unscale_)
def _unscale_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # GradScaler: every rank must skip the step that any rank must skip
    tensors, found_inf, scale = args
    func([each._local_tensor if isinstance(each, RaggedTensor) else each for each in tensors], found_inf, scale)
    specs = [tensor.spec for tensor in tensors if isinstance(tensor, RaggedTensor)]
    for cluster, groups in dict.fromkeys((spec.cluster, spec.outer_groups) for spec in specs):
        all_reduce_outer(groups, all_reduce(cluster, found_inf, dist.ReduceOp.MAX), dist.ReduceOp.MAX)
