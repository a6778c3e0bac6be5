"""Run the kernels of lossless gradients beside their twin: `TRITON_INTERPRET=1 python -m tests.kernels.gradients`.

It prints a JSON object: the number of comparisons, the names of those that differ, and what coding a piece takes: see
tests/kernels/lossless.py. Messages, values and buffers lie between pages that no process may touch. So an access beside
them ends this one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor

from laconic.codec import lossless_gradients_triton
from laconic.codec.lossless_gradients import BLOCK, CODED_DTYPES, decode, encode
from tests.kernels.interpreted import Comparisons, as_a_device_does, on_device, takes
from tests.support.patterns import gradients, with_mean, with_outside

KERNELS = ("_measure", "_write", "_count_live", "_count_outside", "_read")
PROGRAM = lossless_gradients_triton.PROGRAM_BLOCKS * BLOCK
NUMELS = (1, BLOCK - 1, BLOCK + 1, PROGRAM, 3 * PROGRAM + 1030)
_FEW_COUNTED = 2
"""Of programs, so that several count tops."""


def guarded(values: Tensor, *, at_end: bool) -> Tensor:
    """A copy in pages between two that nobody may touch: with its end, or its begin, beside one of these."""
    page, nbytes = mmap.PAGESIZE, values.nbytes
    room = -(-nbytes // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for place in (address, address + page + room):
        assert protect(place, page, 0) == 0
    begin = page + (room - nbytes if at_end else 0)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=begin).view(values.dtype)
    return copy.copy_(values)


def _guarded_empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return guarded(torch.full(shape, 77, dtype=dtype).view(-1), at_end=True).view(shape)


def on_guarded_device(stack: ExitStack) -> None:
    """See `on_device`; what kernels write lies between guarded pages, too."""
    on_device(stack)
    stack.enter_context(mock.patch.object(lossless_gradients_triton.torch, "empty", _guarded_empty))
    stack.enter_context(mock.patch.multiple(lossless_gradients_triton, COUNTED_PROGRAMS=_FEW_COUNTED))
    stack.enter_context(mock.patch.object(lossless_gradients_triton, "_PROGRAMS", _FEW_COUNTED))


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _samples() -> Iterator[tuple[str, Tensor]]:
    for dtype in CODED_DTYPES:
        for numel in NUMELS:
            for case, values in gradients(dtype, numel).items():
                yield f"{dtype}, {numel} {case}", values
    for num, case in ((158, "one byte shorter than values"), (159, "as long as values")):
        yield case, with_outside(num)
    for num in (127, 128):
        yield f"a mean {num} / 256 above a whole number", with_mean(num)


def _compared(samples: Iterable[tuple[str, Tensor]]) -> Comparisons:
    for case, values in samples:
        message = encode(values).read()
        own, apart = guarded(values, at_end=True), guarded(message, at_end=True)
        out = guarded(torch.full_like(values, 7.0), at_end=True)
        with ExitStack() as stack:
            on_guarded_device(stack)
            buffer, length = encode(own)
            decode(apart, out)
        yield f"{case}, encode", torch.equal(buffer[: int(length)], message)
        yield f"{case}, buffer", buffer.nbytes == values.nbytes
        yield f"{case}, decode", same(out, values)


def _damaged() -> Comparisons:
    """Nothing but other values comes of a damaged message that is no shorter than its tops, nor longer than values."""
    draw, changed = random.Random(0), 0
    for index in range(60):
        dtype = CODED_DTYPES[index % len(CODED_DTYPES)]
        case = draw.choice(["usual", "blocks of zeros", "any patterns, then usual ones"])
        values = gradients(dtype, 2 * PROGRAM + 700)[case]
        num_blocks, good = -(-len(values) // BLOCK), encode(values).read()
        message = good.clone()
        match draw.choice(["cut", "longer", "octets", "tops", "zeros become"]):
            case "cut":
                message = message[: draw.randrange(num_blocks, len(message))]
            case "longer":
                message = torch.cat([message, message[: draw.randrange(values.nbytes - len(message))]])
            case "octets":
                for _ in range(draw.choice([1, 50])):
                    message[draw.randrange(len(message))] ^= draw.randrange(1, 256)
            case "tops":
                message[draw.randrange(num_blocks)] = draw.choice([0, 255])
            case "zeros become":
                message[:num_blocks] = 3  # all rows are there, or said to be
        at_end = draw.random() < 0.75
        out = guarded(torch.full_like(values, 7.0), at_end=at_end)
        with ExitStack() as stack:
            on_guarded_device(stack)
            decode(guarded(message, at_end=at_end), out)
        changed += not same(out, values)
    yield "damage shows in values", changed > 30


def takes_a_piece() -> dict[str, dict[str, int]]:
    """The launches and the waits of the host that a piece takes, each way."""
    values = torch.randn(2 * PROGRAM).to(torch.bfloat16)
    message, out = encode(values).read(), torch.empty_like(values)
    return {
        "encode": takes(lambda: encode(values), {lossless_gradients_triton: KERNELS}),
        "decode": takes(lambda: decode(message, out), {lossless_gradients_triton: KERNELS}),
    }


def sample() -> Comparisons:
    """A comparison of each kind, in some seconds."""
    chosen = [(dtype, gradients(dtype, PROGRAM + 1030)) for dtype in CODED_DTYPES[:2]]
    found = ((f"{dtype} {case}", values) for dtype, cases in chosen for case, values in cases.items())
    return _compared((case, values) for case, values in found if "zeros" in case or "then" in case)


if __name__ == "__main__":
    with as_a_device_does():
        results = [pair for sort in (_compared(_samples()), _damaged()) for pair in sort]
    different = [name for name, is_same in results if not is_same]
    print(json.dumps({"compared": len(results), "different": different, "takes": takes_a_piece()}))
