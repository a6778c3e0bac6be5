"""Compile all loops of numba, so that no test waits for a compiler: python -m tests.support.loops."""

from __future__ import annotations

import torch

from laconic.codec import lossless_gradients
from laconic.codec.lossless import decode, encode
from laconic.publish.changes import decode_gaps, digest_at, encode_gaps, run_digest, take_over


def compile_loops() -> None:
    """Call each loop once with each type of numbers that the library has for it."""
    values = torch.ones(8192).bfloat16()
    decode(values, encode(values, values))
    lossless_gradients.decode(lossless_gradients.encode(values).read(), values)
    take_over(values.view(torch.int16), values.view(torch.int16))
    run_digest(values)
    for places in (torch.arange(9), torch.arange(9) * 4000):
        part = encode_gaps(places, values[:9])
        named = {f"key{ending}": tensor for ending, tensor in part.tensors.items()}
        decode_gaps(part.stored_as("file", "key"), named, 40_000, torch.bfloat16)
    digest_at(torch.arange(9), values[:9])


if __name__ == "__main__":
    compile_loops()
