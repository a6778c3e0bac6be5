"""What an operation does to memory, by its schema, and how it runs on tensors that have no values.

[Note: Data without values]
A program's course hangs on few values: its own numbers, the ranks of a mesh, flags. These are real. Python's numbers
are, and single numbers and whole numbers that the program makes in host memory, and all that is computed from such
tensors alone. All other tensors are torch's meta tensors, which the machine knows and places on a device or the host.
They stand for zeros, and what is computed from them for what zeros would give: zero is finite, and equal to zero. So
what the program reads of them says that all is well: no flag is raised, nothing differs, every number is finite.
Messages of other ranks stand for what these would send.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from laconic.rehearse.machine import Machine

aten: Any = torch.ops.aten
Filling = float | Tensor
"""The number that all elements of a tensor without values stand for, or the tensor that it stands for."""
Inputs = Sequence[tuple[Tensor, bool]]
"""The tensors that an operation gets, and whether it writes them."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
_MOST_REAL_NUMBERS = 1 << 20  # a few for each rank of a large mesh
_WHOLE = {torch.int16, torch.int32, torch.int64, torch.bool}  # bytes may be parts of anything
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    f"aten::{each.__name__}": each
    for each in (operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt)
}
_FILLS = {"aten::ones": 1, "aten::ones_like": 1, "aten::new_ones": 1}
_KEEPS = {
    *("aten::all", "aten::any", "aten::_to_copy", "aten::clone", "aten::copy_", "aten::cat", "aten::stack"),
    *("aten::bitwise_and", "aten::bitwise_or", "aten::logical_and", "aten::logical_or", "aten::min", "aten::max"),
    *("aten::amin", "aten::amax", "aten::mul", "aten::prod", "aten::index_select", "aten::gather"),
}
_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_LIKE = {
    *("aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like"),
    *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the schema of an operation says of it."""

    name: str
    writes: tuple[bool, ...]
    """By the position of the argument: whether the operation writes it."""
    writes_by_name: dict[str, bool]
    writes_any: bool
    is_view: bool
    """True if it touches no memory, and its results are views of its arguments."""
    is_empty: bool
    """True if its result is memory that it does not write."""
    makes: bool
    """True if it makes a tensor, with no regard to the values of others."""
    reads_values: bool
    is_random: bool
    gives_value: bool
    needs_host: bool


@functools.cache
def kind_of(function: Any) -> Kind:
    """Read the schema of an operation."""
    schema, tags = function._schema, function.tags
    by_name = {each.name: each.alias_info is not None and each.alias_info.is_write for each in schema.arguments}
    gives_value = torch.Tag.data_dependent_output in tags
    aliases = [each.alias_info is not None for each in schema.returns]
    return Kind(
        name=schema.name,
        writes=tuple(by_name.values()),
        writes_by_name=by_name,
        writes_any=any(by_name.values()),
        is_view=bool(aliases) and all(aliases) and not any(by_name.values()) and not gives_value,
        is_empty=schema.name in _EMPTY,
        makes=schema.name in _EMPTY | _LIKE or ("device" in by_name and not _takes_tensors(schema)),
        reads_values=schema.name not in _EMPTY | _LIKE,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        gives_value=gives_value,
        needs_host=gives_value or torch.Tag.dynamic_output_shape in tags,
    )


def _takes_tensors(schema: Any) -> bool:
    return any("Tensor" in str(each.type) for each in schema.arguments)


def inputs_of(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool]]:
    """The tensors that an operation gets, and whether it writes them."""
    found: list[tuple[Tensor, bool]] = []
    given = [*zip(args, kind.writes, strict=False), *((value, kind.writes_by_name[k]) for k, value in kwargs.items())]
    for value, is_write in given:
        if isinstance(value, Tensor):
            found.append((value, is_write))
        elif isinstance(value, (list, tuple)):
            found += [(each, is_write) for each in value if isinstance(each, Tensor)]
    return found


def run(machine: Machine, kind: Kind, function: Any, args: Any, kwargs: dict[str, Any], inputs: Inputs) -> Any:
    """Run an operation: [Note: Data without values]. Its results are not registered yet."""
    without = [tensor for tensor, _ in inputs if tensor.is_meta]
    if kind.makes:
        return _made(machine, function, args, kwargs, inputs)
    if not without:
        return function(*args, **kwargs)
    if kind.needs_host and not _indexes_by_number(function, args):
        return answer(machine, function, without[0])
    twins: dict[int, Tensor] = {}
    reals: dict[int, Tensor] = {}
    for tensor, _ in inputs:
        if not tensor.is_meta and id(tensor) not in twins:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            twins[id(tensor)], reals[id(twin)] = twin, tensor
    if twins:
        args, kwargs = pytree.tree_map_only(Tensor, lambda each: twins.get(id(each), each), (args, kwargs))
    result = function(*args, **_on_meta(kwargs))
    if not twins:
        return result
    value = stands_for(machine, kind, args, inputs)
    for tensor, is_write in inputs:
        if is_write and not tensor.is_meta:
            tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)
    return pytree.tree_map_only(Tensor, lambda each: reals.get(id(each), each), result)


def stands_for(machine: Machine, kind: Kind, args: Sequence[Any], inputs: Inputs) -> Filling:
    """What the result of an operation on tensors without values stands for."""
    if kind.name in _FILLS:
        return _FILLS[kind.name]
    read = [tensor for tensor, is_write in inputs if not is_write] or [tensor for tensor, _ in inputs]
    values = [machine.memory(tensor).stands_for for tensor in read if tensor.is_meta]
    numbers = [each for each in values if not isinstance(each, Tensor)]
    if kind.name in _COMPARISONS and len(args) == 2 and len(numbers) == len(values) > 0:
        others = [each for each in args if isinstance(each, int | float)]
        return int(_COMPARISONS[kind.name](numbers[0], [*numbers[1:], *others, 0][0]))
    if kind.name in _COMPARISONS and len(values) == 1 and not numbers and isinstance(args[1], int | float):
        with _disable_current_modes():
            return _COMPARISONS[kind.name](values[0], args[1])
    if kind.name == "aten::logical_not" and numbers:
        return int(not numbers[0])
    if kind.name in _KEEPS and values and all(each is values[0] for each in values):
        return values[0]
    return 0


def value_without(machine: Machine, tensor: Tensor) -> Tensor:
    """What the program reads of a tensor without values."""
    value = machine.memory(tensor).stands_for
    with _disable_current_modes():
        if isinstance(value, Tensor) and value.shape == tensor.shape:
            return value.to(tensor.dtype)
        return torch.full(tensor.shape, 0 if isinstance(value, Tensor) else value, dtype=tensor.dtype)


def answer(machine: Machine, function: Any, tensor: Tensor) -> Any:
    """The result of an operation whose result, or its shape, hangs on values.

    Raises:
        ValueError: nobody can say.
    """
    if function is aten._local_scalar_dense.default:
        return value_without(machine, tensor).item()
    if function in (aten.equal.default, aten.allclose.default):
        return True
    if function is aten.nonzero.default:
        value = machine.memory(tensor).stands_for
        if isinstance(value, Tensor) and value.shape == tensor.shape:
            with _disable_current_modes():
                return value.nonzero()
        num_found = tensor.numel() if isinstance(value, int | float) and value else 0
        return torch.empty(num_found, tensor.dim(), dtype=torch.int64, device=_META)
    raise ValueError(
        f"{function} has a result whose shape hangs on values, and this rehearsal has none; rehearse with "
        "has_values=True, or keep the operation out of the program"
    )


def _indexes_by_number(function: Any, args: Sequence[Any]) -> bool:
    """True for an index whose result has a shape that does not hang on values, as that of a mask does."""
    masks = (torch.bool, torch.uint8)
    return function is aten.index.Tensor and not any(each is not None and each.dtype in masks for each in args[1])


def _made(machine: Machine, function: Any, args: Any, kwargs: dict[str, Any], inputs: Inputs) -> Any:
    """Make memory: real for single and whole numbers in host memory."""
    device = kwargs.get("device")
    if device is not None and device.type == "meta":
        return function(*args, **kwargs)  # the program's own
    made = function(*args, **_on_meta({**kwargs, "device": _META}))
    lies = machine.placing or (any(machine.is_on_device(tensor) for tensor, _ in inputs), False)
    is_like_real = any(not tensor.is_meta for tensor, _ in inputs)
    is_number = made.dim() == 0 or made.dtype in _WHOLE
    if any(lies) or not (is_number or is_like_real) or not 0 < made.numel() <= _MOST_REAL_NUMBERS:
        return made
    return function(*args, **{**kwargs, "device": _CPU})


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the same operation on meta tensors."""
    changed = {name: None if name in ("generator", "pin_memory") else value for name, value in kwargs.items()}
    if changed.get("device") is not None:
        changed["device"] = _META
    return changed
