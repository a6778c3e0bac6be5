"""Triton's kernels of the codecs on an accelerator that is not there: each is one operation, as on a GPU.

If there are values, the plain chain in torch computes the result; tests/kernels proves that kernel and chain give equal
bits. So the tape has the kernel's own reads and writes, and none of the memory that the chain takes in between. The
coders of lossless differences and gradients are such operations on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from laconic.codec.lossless import UnreadMessage
from laconic.rehearse.machine import Machine, Run

PASSES_OF_LOOPS = 6
"""The loops of numba for lossless differences and gradients take a CPU as long as it takes to read values so often."""


def kernels_of(machine: Machine) -> Callable[..., Any]:
    """Return what takes the place of `kernels_for`: of codec/blocked_triton.py and layers/scaled_triton.py."""
    launch = partial(_launch, machine)

    def encode_blocks(
        codec: Any, values: Tensor, base: Tensor | None, codes: Tensor, steps: Tensor, *, rotates: bool = False
    ) -> None:
        launch(_encode, [codes, steps], [values, base], codec, rotates)

    def decode_blocks(
        codec: Any, codes: Tensor, steps: Tensor, out: Tensor, *, adds: bool = False, rotates: bool = False
    ) -> None:
        launch(_decode, [out], [codes, steps, out if adds else None], codec, rotates)

    def quantize(form: Any, matrix: Tensor, matrix_scale: Tensor | None, codes: Tensor, scales: Tensor) -> None:
        launch(_quantize, [codes, scales], [matrix, matrix_scale], form)

    def dequantize(form: Any, codes: Tensor, scales: Tensor, matrix_scale: Tensor | None, out: Tensor) -> None:
        launch(_dequantize, [out], [codes, scales, matrix_scale], form)

    modules = {
        "codec.blocked_triton": SimpleNamespace(encode=encode_blocks, decode=decode_blocks),
        "layers.scaled_triton": SimpleNamespace(encode=quantize, decode=dequantize),
    }

    def kernels_for(tensor: Tensor, name: str) -> Any:
        return modules[name] if tensor.is_cuda and type(tensor) is Tensor else None  # not so while a chain stands in

    return kernels_for


def encode_difference(machine: Machine, held: Tensor, new: Tensor) -> UnreadMessage:
    """Stands for `encode_in_pieces` of codec/lossless.py, since what that does hangs on values.

    A message has the bits of the new values, and who reads it keeps what is held.
    """
    buffer, length = held.new_empty(new.nbytes, dtype=torch.uint8), held.new_empty(1, dtype=torch.int64)
    written = [buffer, length, torch.empty_like(new)]
    _launch(machine, _write_message, written, [*_passes(held, new), held, new])
    return UnreadMessage(buffer, length)


def decode_difference(machine: Machine, held: Tensor, message: Tensor, *, faults: list[Tensor]) -> None:
    """Stands for `decode_in_pieces` of codec/lossless.py."""
    fault = held.new_empty(1, dtype=torch.int32)
    _launch(machine, _read_message, [held, fault], [*_passes(held, held), message])
    faults.append(fault)


def encode_gradients(machine: Machine, values: Tensor) -> UnreadMessage:
    """Stands for `encode` of codec/lossless_gradients.py. A message has the bits of the values."""
    buffer, length = values.new_empty(values.nbytes, dtype=torch.uint8), values.new_empty(1, dtype=torch.int64)
    # once to find the length, and once to write the message
    _launch(machine, _write_gradients, [buffer, length], [*_passes(values), values, values])
    return UnreadMessage(buffer, length)


def decode_gradients(machine: Machine, message: Tensor, out: Tensor) -> None:
    """Stands for `decode` of codec/lossless_gradients.py."""
    _launch(machine, _read_gradients, [out], [*_passes(out), message])


def _passes(*values: Tensor) -> list[Tensor]:
    return [] if values[0].is_cuda else list(values) * PASSES_OF_LOOPS


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
    _write_gradients(buffer, length, *others)
    words.copy_(others[-1])


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
