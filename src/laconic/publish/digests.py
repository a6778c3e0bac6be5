"""Digests of tensors whose elements lie on several ranks, and change a few at a time.

[Note: Digests of published tensors]
A reader must know that it holds the version that a patch is for, and that it holds the right one afterwards. A hash
such as SHA-256 needs all bytes of a tensor in order, and no rank has them. So each element is mixed with its place in
the flattened tensor to a number of 64 bits, and the digest of a tensor is their sum, modulo 2^64. Each rank sums over
its own elements; the sums of ranks add up. A change takes the old number off and adds the new one, so a digest follows
a patch at the cost of the patch.

Two elements with other bits, or at other places, make other numbers that look random. So a wrong tensor has the right
digest once in 2^64 times. It finds mistakes and damage. It is no signature: who can forge a manifest can forge digests.
The files of a version have SHA-256 besides: [Note: A store] in store/folder.py. tests/reference/publish.py says the
same in Python's integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.publish.changes import bits_of, loops_for

FACTORS = _PLACE, _FIRST, _SECOND = tuple(
    factor - 2**64 for factor in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9)
)
"""The odd numbers of 64 bits that mix, as torch's whole numbers."""
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 15, 1 << 22
"""The elements that are mixed at once: on a CPU their numbers fit its caches."""
_MODULUS = 1 << 64


def run_digest(values: Tensor, start: int = 0) -> int:
    """The share of elements [start, start + n) in the digest of their tensor.

    Shapes: values (n,), of any dtype, on any device. Cost: one pass, and one wait for the device.
    Reference: tests/reference/publish.py.
    """
    if (loops := loops_for(values=values)) is not None:
        share: int = loops.digest_of_run(bits_of(values), start)
        return share
    size = _HOST_CHUNK if values.device.type == "cpu" else _DEVICE_CHUNK
    places = torch.arange(min(size, len(values)), device=values.device) * _PLACE
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, len(values), size):
        chunk = values[begin : begin + size]
        total += _mixed(chunk, places[: len(chunk)] + _wrapped((start + begin) * _PLACE)).sum()
    return int(total) % _MODULUS


def digest_at(positions: Tensor, values: Tensor) -> int:
    """The share of elements at any places, (n,), int64, in the digest of their tensor; see `run_digest`."""
    if (loops := loops_for(positions, values=values)) is not None:
        share: int = loops.digest_of_places(positions, bits_of(values))
        return share
    return int(_mixed(values, positions * _PLACE).sum()) % _MODULUS


def added(*digests: int) -> int:
    """The sum of digests. A negative one is taken off."""
    return sum(digests) % _MODULUS


def as_text(digest: int) -> str:
    """A digest as a manifest has it: 16 hexadecimal digits."""
    return f"{digest:016x}"


def _mixed(values: Tensor, places: Tensor) -> Tensor:
    """Mix elements, (n,), with their places times `_PLACE`, (n,), int64, which this overwrites."""
    width = 8 * values.element_size()
    patterns = bits_of(values).to(torch.int64)
    numbers = places.add_(patterns if width == 64 else patterns & ((1 << width) - 1))
    for shift, factor in ((32, _FIRST), (29, _SECOND)):
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)  # torch's shift repeats the sign
        numbers *= factor
    return numbers


def _wrapped(number: int) -> int:
    """A number modulo 2^64, with a sign."""
    return (number + 2**63) % _MODULUS - 2**63
