"""The FLOPs and the bytes of operations of torch, from the shapes of their arguments and results.

[Note: FLOPs that run]
Formulas are those of torch.utils.flop_counter, with one exception. Fused attention kernels skip the blocks above the
diagonal when attention is causal, so causal attention counts half of torch's formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from laconic.plan.fake_kernels import grouped_flops
from laconic.plan.phase import OpWork
from laconic.rehearse import Machine

_ATEN = torch.ops.aten
_ATTENTION = {
    packet: factor
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    # forward Q K^T and P V; backward Q K^T once more, and the gradients of P, V, Q and K
    for end, factor in (("", 2), ("_backward", 5))
    if (packet := getattr(_ATEN, f"_scaled_dot_product_{name}{end}", None)) is not None
}
"""The operations of fused attention -> the products of (queries, keys, head size) of each."""
_GROUPED = getattr(_ATEN, "_grouped_mm", None)
_READS_ROWS = {_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index}
"""Operations that read as many elements of their first argument as they write."""
_READS_NONE = {_ATEN.copy_, _ATEN.fill_, _ATEN.zero_}
"""Operations that overwrite their first argument."""
_ALLOCATES = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.empty_permuted, _ATEN.new_empty, _ATEN.new_empty_strided,
}  # fmt: skip


def op_work(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> OpWork | None:
    """The bytes and FLOPs of an operation ([Note: FLOPs that run]); None for views and allocations, which do none."""
    nbytes = bytes_of(func, args, kwargs, out)
    if not nbytes:
        return None
    packet = getattr(func, "_overloadpacket", None)  # none for a function that is one kernel
    flops = 0.0
    if packet in _ATTENTION:
        flops = _ATTENTION[packet] * _attention_product(func, args, kwargs)
    elif packet is not None and packet is _GROUPED:
        flops = grouped_flops(args[0], args[1])
    elif packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    dtype = str(tensors_of((args, kwargs))[0].dtype).removeprefix("torch.") if flops else None
    return OpWork(nbytes, flops=flops, dtype=dtype, is_attention=packet in _ATTENTION)


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """The bytes that an operation reads and writes, if it is no view."""
    packet = getattr(func, "_overloadpacket", None)  # none for a function that is one kernel
    if packet in _ALLOCATES:
        return 0.0
    written = sum(map(nbytes_of, tensors_of(out))) if out is not None else _changed_bytes(func, args, kwargs)
    read = [nbytes_of(tensor) for tensor in tensors_of((args, kwargs))]
    if read and packet in _READS_NONE:
        read[0] = 0
    elif read and packet in _READS_ROWS:
        read[0] = min(read[0], written)
    return float(written + sum(read))


def _changed_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The bytes that an operation writes in place that returns nothing."""
    arguments = func._schema.arguments
    named = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    changed = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    changed = [name for name in changed if name != "grads"]  # fused optimizers write those only to unscale them
    return sum(map(nbytes_of, tensors_of([named.get(name) for name in changed])))


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; an element that stands in many places counts once."""
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in the arguments or the results of an operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


def _attention_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The FLOPs of one of attention's products. Shapes: (B, H, S, D)."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key = given["query"].shape, given["key"].shape
    flops = 2.0 * query[0] * query[1] * query[2] * key[2] * query[3]
    return flops / 2 if given.get("is_causal", False) else flops


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between the device and the host."""

    nbytes: float
    to_device: bool


class Costs:
    """Says what the operations of a rehearsed program cost: `rehearse.Machine.cost_of`."""

    def __init__(self) -> None:
        self.machine: Machine | None = None
        """The machine of the rehearsal, once it is there."""
        self.is_silent = False
        """True while operations belong to a phase of the model, which has their cost already."""
        self._times = 1.0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let the operations of the body cost nothing."""
        before, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = before

    @contextmanager
    def times(self, count: float) -> Iterator[None]:
        """Let each operation of the body stand for `count` operations."""
        before, self._times = self._times, self._times * count
        try:
            yield
        finally:
            self._times = before

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> OpWork | Copy | None:
        """The cost of an operation that is no view; None for nothing, and for small messages of the host."""
        if self.is_silent:
            return None
        given = [each for each in tensors_of((args, out)) if each.is_meta]
        work, times, machine = op_work(func, args, kwargs, out) if given else None, self._times, self.machine
        if work is None:
            return None
        assert machine is not None
        if machine.device.type == "cpu":
            on_host = [machine.memory(each).is_pinned for each in given if machine.knows(each)]
        else:
            on_host = [not machine.is_on_device(each) for each in given if machine.knows(each)]
        if any(on_host) and not all(on_host):
            return Copy(times * work.nbytes / 2, to_device=not on_host[0])
        is_hosts = any(on_host) and machine.device.type != "cpu"
        return replace(work, nbytes=times * work.nbytes, flops=times * work.flops, count=times, on_host=is_hosts)
