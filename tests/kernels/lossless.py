"""Run the kernels of lossless differences beside their twin: `TRITON_INTERPRET=1 python -m tests.kernels.lossless`.

It prints a JSON object: the number of comparisons, the names of those that differ, and what coding a piece takes: the
kernels of triton, the operations of torch that are kernels, too, and the times that the host waits for the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import islice
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from laconic.codec import lossless, lossless_triton
from laconic.codec.contexts import TILE
from laconic.codec.lossless import decode, decode_in_pieces, encode, encode_in_pieces
from tests.kernels.interpreted import Comparisons, as_a_device_does, both, on_device, takes
from tests.support.patterns import bits_of, trained, versions

KERNELS = ("_write", "_gather", "_find", "_read")
_SHORT, _LONG = TILE + 1030, 8 * TILE + 78
"""A tile that is not full, and nine tiles."""


def _compared(found: Iterable[tuple[str, Tensor, Tensor]]) -> Comparisons:
    for case, held, new in found:
        payload, own = both(lambda h=held, n=new: encode(h, n))  # type: ignore[misc]
        yield f"{case}, encode", torch.equal(own, payload)
        apart = torch.zeros(len(payload) + 3, dtype=torch.uint8)
        apart[3:] = payload
        with ExitStack() as stack:
            on_device(stack)
            decoded = decode(held, apart[3:])  # at an odd address
        yield f"{case}, decode", torch.equal(bits_of(decoded), bits_of(new))


def _backwards() -> Comparisons:
    """Programs that run from the last to the first: whichever finishes last does what is left to do."""
    (held, new), forwards = trained("bfloat16", _LONG, 1e-3), interpreter_builder.set_grid_idx

    def set_from_the_end(x: int, y: int, z: int) -> None:
        forwards(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    payload = encode(held, new)
    with ExitStack() as stack:
        on_device(stack)
        stack.enter_context(mock.patch.object(interpreter_builder, "set_grid_idx", set_from_the_end))
        yield "backwards, encode", torch.equal(encode(held, new), payload)


def _pieces() -> Comparisons:
    """Messages of several pieces, decoded in place."""
    with mock.patch.multiple(lossless, HOST_PIECE_NUMEL=2 * TILE, DEVICE_PIECE_NUMEL=2 * TILE):
        held, new = trained("bfloat16", 2 * TILE + _SHORT, 1e-4)
        yield "pieces, encode", torch.equal(*both(lambda: encode_in_pieces(held, new).read()))
        message, copy = encode_in_pieces(held, new).read(), held.clone()
        with ExitStack() as stack:
            on_device(stack)
            decode_in_pieces(copy, message)
        yield "pieces, decode", torch.equal(bits_of(copy), bits_of(new))


def _damaged() -> Comparisons:
    """Nothing but a ValueError or other values comes of a damaged payload."""
    (held, new), refused = trained("bfloat16", 1500, 1e-3), 0
    payload, generator = encode(held, new), torch.Generator().manual_seed(0)
    for _ in range(24):
        bad = payload.clone()
        place, bit = (int(torch.randint(most, (1,), generator=generator)) for most in (len(bad), 8))
        bad[place] ^= 1 << bit
        with ExitStack() as stack:
            on_device(stack)
            try:
                decode(held, bad)
            except ValueError:
                refused += 1
    yield "damage is noticed", refused > 2


def takes_a_piece() -> dict[str, dict[str, int]]:
    """The launches and the waits of the host that a piece takes, each way."""
    held, new = trained("bfloat16", TILE, 1e-3)
    payload, message, copy = encode(held, new), encode_in_pieces(held, new).read(), held.clone()
    runs: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(held, new),
        "decode": lambda: decode(held, payload),
        "encode a message": lambda: encode_in_pieces(held, new),
        "decode a message": lambda: decode_in_pieces(copy, message, faults=[]),
    }
    return {way: takes(run, {lossless_triton: KERNELS}) for way, run in runs.items()}


def sample() -> Comparisons:
    """A comparison of each kind, in some seconds."""
    return _compared(islice(versions(_SHORT), 1))


if __name__ == "__main__":
    with as_a_device_does():
        results = [
            pair
            for sort in (
                _compared([*versions(_SHORT), ("nine tiles", *trained("bfloat16", _LONG, 1e-3))]),
                _backwards(),
                _pieces(),
                _damaged(),
            )
            for pair in sort
        ]
    different = [name for name, is_same in results if not is_same]
    print(json.dumps({"compared": len(results), "different": different, "takes": takes_a_piece()}))
