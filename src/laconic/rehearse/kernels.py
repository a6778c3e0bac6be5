"""Triton's kernels of the codecs on an accelerator that is not there: each is one operation, as on a GPU.

If there are values, the plain chain in torch computes the result; tests/kernels proves that kernel and chain give equal
bits. So the tape has the kernel's own reads and writes, and none of the memory that the chain takes in between. The
coders of lossless differences and gradients are such operations on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from laconic.codec.lossless import UnreadMessage
from laconic.rehearse.machine import Machine, Run

PASSES_OF_LOOPS = 6
"""The loops of numba for lossless differences take a CPU as long as it takes to read both values so often."""
_PASSES_OF_GRADIENTS = 6
"""The same of lossless gradients."""


class BlockKernels:
    """Stands for codec/blocked_triton.py."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def encode(
        self, codec: Any, values: Tensor, base: Tensor | None, codes: Tensor, steps: Tensor, *, rotates: bool = False
    ) -> None:
        """See `blocked_triton.encode`."""
        _launch(self._machine, _encode, [codes, steps], [values, base], codec, rotates)

    def decode(
        self, codec: Any, codes: Tensor, steps: Tensor, out: Tensor, *, adds: bool = False, rotates: bool = False
    ) -> None:
        """See `blocked_triton.decode`."""
        _launch(self._machine, _decode, [out], [codes, steps, out if adds else None], codec, rotates)


class ScaledKernels:
    """Stands for layers/scaled_triton.py."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def encode(self, form: Any, matrix: Tensor, matrix_scale: Tensor | None, codes: Tensor, scales: Tensor) -> None:
        """See `scaled_triton.encode`."""
        _launch(self._machine, _quantize, [codes, scales], [matrix, matrix_scale], form)

    def decode(self, form: Any, codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, out: Tensor) -> None:
        """See `scaled_triton.decode`."""
        _launch(self._machine, _dequantize, [out], [codes, scales, matrix_scale], form)


class LosslessCoder:
    """Stands for `encode_in_pieces` and `decode_in_pieces` of codec/lossless.py, since what they do hangs on values.

    A message has the bits of the new values, and who reads it keeps what is held.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def encode(self, held: Tensor, new: Tensor) -> UnreadMessage:
        """See `lossless.encode_in_pieces`."""
        buffer, length = held.new_empty(new.nbytes, dtype=torch.uint8), held.new_empty(1, dtype=torch.int64)
        written = [buffer, length, torch.empty_like(new)]
        _launch(self._machine, _write_message, written, [*_passes(held, new), held, new])
        return UnreadMessage(buffer, length)

    def decode(self, held: Tensor, message: Tensor, *, faults: list[Tensor]) -> None:
        """See `lossless.decode_in_pieces`."""
        fault = held.new_empty(1, dtype=torch.int32)
        _launch(self._machine, _read_message, [held, fault], [*_passes(held, held), message])
        faults.append(fault)


class GradientCoder:
    """Stands for `encode` and `decode` of codec/lossless_gradients.py. A message has the bits of the values."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def encode(self, values: Tensor) -> UnreadMessage:
        """See `lossless_gradients.encode`."""
        buffer, length = values.new_empty(values.nbytes, dtype=torch.uint8), values.new_empty(1, dtype=torch.int64)
        # once to find the length, and once to write the message
        read = [*_passes(values, often=_PASSES_OF_GRADIENTS), values, values]
        _launch(self._machine, _write_gradients, [buffer, length], read)
        return UnreadMessage(buffer, length)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """See `lossless_gradients.decode`."""
        _launch(self._machine, _read_gradients, [out], [*_passes(out, often=_PASSES_OF_GRADIENTS), message])


def _passes(*values: Tensor, often: int = PASSES_OF_LOOPS) -> list[Tensor]:
    return [] if values[0].is_cuda else list(values) * often


def kernels_of(machine: Machine) -> Callable[..., Any]:
    """Return what takes the place of `kernels_for` in laconic.codec."""
    modules = {"codec.blocked_triton": BlockKernels(machine), "layers.scaled_triton": ScaledKernels(machine)}

    def kernels_for(tensor: Tensor, name: str) -> Any:
        return modules[name] if tensor.is_cuda and type(tensor) is Tensor else None  # not so while a chain stands in

    return kernels_for


def _encode(codes: Tensor, steps: Tensor, values: Tensor, base: Tensor | None, codec: Any, rotates: bool) -> None:
    payload = torch.empty(codes.numel() + steps.numel(), dtype=torch.uint8)
    codec.encode_into(payload, values, base, check=False, rotates=rotates)
    codes.copy_(payload[: codes.numel()])
    steps.copy_(payload[codes.numel() :])


def _decode(out: Tensor, codes: Tensor, steps: Tensor, addend: Tensor | None, codec: Any, rotates: bool) -> None:
    codec.decode_into(out, torch.cat([codes, steps]), adds=addend is not None, rotates=rotates)


def _quantize(codes: Tensor, scales: Tensor, matrix: Tensor, matrix_scale: Tensor | None, form: Any) -> None:
    for to, values in zip((codes, scales), form.quantize(matrix, matrix_scale), strict=True):
        to.copy_(values)


def _dequantize(out: Tensor, codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, form: Any) -> None:
    out.copy_(form.dequantize(codes, scales, matrix_scale, out.dtype))


def _write_message(buffer: Tensor, length: Tensor, words: Tensor, *others: Tensor) -> None:
    new = others[-1]
    buffer.copy_(new.view(torch.uint8))
    length.fill_(len(buffer))
    words.copy_(new)


def _read_message(held: Tensor, fault: Tensor, *others: Tensor) -> None:
    fault.zero_()


def _write_gradients(buffer: Tensor, length: Tensor, *others: Tensor) -> None:
    buffer.copy_(others[-1].contiguous().view(torch.uint8))
    length.fill_(len(buffer))


def _read_gradients(out: Tensor, *others: Tensor) -> None:
    out.zero_()


def _launch(
    machine: Machine, function: Callable[..., None], written: list[Tensor], read: Sequence[Tensor | None], *facts: Any
) -> None:
    """Run `function(*written, *read, *facts)`, if there are values, and write it down as one operation."""
    arguments = (*written, *read, *facts)
    tensors = [each for each in read if each is not None]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if machine.has_values:
            function(*arguments)
        if not machine.is_recording:
            return
        cost = machine.cost_of(function, tensors, {}, written) if machine.cost_of is not None else None
        if machine.cost_of is not None and cost is None:
            return
        run = None
        if machine.has_values:
            references = (machine.reference(each) if isinstance(each, Tensor) else each for each in arguments)
            run = Run(function, tuple(references), {}, [], None, gives_value=False)
        touched = [*((each, True) for each in written), *((each, False) for each in tensors)]
        machine.add_step(function.__name__.strip("_"), touched, run, cost)
