"""A record of what operations on fake tensors compute and keep, phase by phase.

[Note: Sums of gradients]
Where paths of a graph meet, autograd adds up their gradients: in place if nothing else holds the first one, but never
in place for fake tensors (`can_accumulate_inplace` in torch's input_buffer.cpp). The fake sum is a new tensor, and both
summands are freed before the next operation if nothing else holds them. So the recorder looks once more then: if as
much was freed, the sum was in place, and its memory was never alive beside both summands. A view holds the tensor that
it is a view of, so autograd never adds to one in place: neither to the gradient of a linear layer's weight, which is a
transposed product.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.plan.fake_kernels import grouped_product
from laconic.plan.op_cost import op_work, tensors_of
from laconic.plan.phase import Arrival, OpWork, Phase

_ADD = torch.ops.aten.add.Tensor
_WRAPPERS = ("_compile.py", "eval_frame.py")
"""The ends of the files of torch's wrappers around a mode's `__torch_dispatch__`."""
_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
_ALLOCATION_BYTES = {"cuda": 512}
"""The bytes that allocations are a multiple of. torch's CPU allocator takes what is asked for."""


@dataclass(kw_only=True)
class _OpenPhase:
    unit: int
    is_backward: bool
    start_bytes: int
    """The bytes alive at its start, from which the others count."""
    products: Counter[OpWork] = field(default_factory=Counter)
    """The number of equal operations with products."""
    other_ops: int = 0
    other_bytes: float = 0.0
    peak_bytes: int = 0
    arrivals: list[Arrival] = field(default_factory=list)

    def close(self, end_bytes: int) -> Phase:
        work = [
            replace(each, nbytes=count * each.nbytes, flops=count * each.flops, count=count)
            for each, count in self.products.items()
        ]
        if self.other_ops:
            work.append(OpWork(self.other_bytes, count=self.other_ops))
        return Phase(
            unit=self.unit, is_backward=self.is_backward, work=tuple(work), peak_bytes=self.peak_bytes,
            end_bytes=end_bytes - self.start_bytes, arrivals=tuple(self.arrivals),
        )  # fmt: skip


class Recorder(TorchDispatchMode):
    """Watches operations: their cost, the storages that they allocate, and the moments at which those are freed."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._quantum = _ALLOCATION_BYTES.get(device_type, 1)
        self._alive_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        """The bytes of every storage that is alive and counts as an activation."""
        self._sum: tuple[int, int] | None = None
        """The bytes alive before the last operation, and its own: of a sum that may be in place."""
        self._phase: _OpenPhase | None = None
        self.phases: list[Phase] = []
        """The phases that have ended."""

    def exclude(self, tensor: Tensor) -> None:
        """Never count the memory of `tensor`."""
        self._watch(tensor, counts=False)

    def begin(self, unit: int, *, is_backward: bool) -> None:
        """End the running phase, and begin one of a unit, unless the running one is of this unit and direction."""
        running = self._phase
        if running is not None and (running.unit, running.is_backward) == (unit, is_backward):
            return
        self.end()
        self._phase = _OpenPhase(unit=unit, is_backward=is_backward, start_bytes=self._alive_bytes)

    def end(self) -> None:
        """End the running phase."""
        self._settle_sum()
        running = self._phase
        if running is not None:
            self.phases.append(running.close(self._alive_bytes))
        self._phase = None

    def hand_over(self, name: str, gradient: Tensor) -> None:
        """Count the gradient of parameter `name` as one that has arrived."""
        nbytes = self._sizes.pop(gradient.untyped_storage()._cdata, 0)
        self._note_gradient(name, nbytes)
        self._alive_bytes -= nbytes

    def add_product(self, name: str, left: Tensor, right: Tensor, itemsize: int) -> None:
        """Count left @ right, the gradient of parameter `name`, written into memory that is no activation.

        Shapes: (m, k) @ (k, n).
        """
        self._note_gradient(name, 0, is_in_place=True)
        rows, inner = left.shape
        columns = right.shape[1]
        nbytes, dtype = left.nbytes + right.nbytes + rows * columns * itemsize, str(left.dtype).removeprefix("torch.")
        self._add(OpWork(float(nbytes), flops=2.0 * rows * inner * columns, dtype=dtype))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and record it."""
        kwargs = kwargs or {}
        if func.namespace != "prim":
            self._settle_sum()
        before_bytes = self._alive_bytes
        out = grouped_product(*args, **kwargs) if func._overloadpacket is _GROUPED else func(*args, **kwargs)
        if func.namespace == "prim":  # the question for a tensor's device
            return out
        has_new = False
        for tensor in tensors_of(out):
            has_new |= self._watch(tensor, counts=True)
        if has_new or func._schema.is_mutable:
            self._add(op_work(func, args, kwargs, out))
        if func is _ADD and _comes_from_autograd() and not args[0]._is_view():
            self._sum = before_bytes, self._alive_bytes - before_bytes
        else:
            self._note_peak(self._alive_bytes)
        return out

    def _settle_sum(self) -> None:
        """Count the memory of a sum of gradients that was not in place: [Note: Sums of gradients]."""
        if self._sum is not None:
            before_bytes, own_bytes = self._sum
            self._sum = None
            if self._alive_bytes > before_bytes - own_bytes:
                self._note_peak(before_bytes + own_bytes)

    def _note_gradient(self, name: str, nbytes: int, *, is_in_place: bool = False) -> None:
        """Note the gradient of parameter `name`, of which `nbytes` were activations."""
        self._settle_sum()
        if self._phase is not None:
            alive_bytes = self._alive_bytes - self._phase.start_bytes
            self._phase.arrivals.append(Arrival(name, alive_bytes, alive_bytes - nbytes, is_in_place))

    def _note_peak(self, alive_bytes: int) -> None:
        phase = self._phase
        if phase is not None:
            alive_bytes -= phase.start_bytes
            phase.peak_bytes = max(phase.peak_bytes, alive_bytes)
            if phase.arrivals:
                last = phase.arrivals[-1]
                phase.arrivals[-1] = replace(last, after_bytes=max(last.after_bytes, alive_bytes))

    def _add(self, work: OpWork | None) -> None:
        if self._phase is None or work is None:
            return
        if work.dtype is not None:
            self._phase.products[work] += 1
        else:
            self._phase.other_ops += 1
            self._phase.other_bytes += work.nbytes

    def _watch(self, tensor: Tensor, *, counts: bool) -> bool:
        """Follow a tensor's storage until it is freed. Returns whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key))
        if counts:
            size = -(-storage.nbytes() // self._quantum) * self._quantum
            self._sizes[key] = size
            self._alive_bytes += size
        return True

    def _free(self, key: int) -> None:
        del self._storages[key]
        self._alive_bytes -= self._sizes.pop(key, 0)


def _comes_from_autograd() -> bool:
    """True in `__torch_dispatch__` if autograd's engine itself runs the operation, or a backward written in C++."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame.f_code is _engine_run_backward.__code__
