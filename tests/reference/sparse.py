"""The oracle of the sparse codec: the largest values of each chunk, one after the other, and the bits of their message.

A message has the chunks one behind the other, and of each the places in Elias and Fano's code, written here as it is
told: the chunk is cut into buckets of 2**low places; for each bucket there is a one for each kept place in it, and then
a zero; then come the low bits of each place.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

CHUNK = 4096


def low_bits(keep: int) -> int:
    """The bits of each place that are sent as they are."""
    return math.floor(math.log2(CHUNK / keep))


def message_bytes(numel: int, keep: int) -> int:
    """The bytes of a message: of each chunk the places, two bits for each kept value, and two magnitudes in bf16."""
    low = low_bits(keep)
    places = keep * low + keep + CHUNK // 2**low
    return math.ceil(numel / CHUNK) * (math.ceil((places + 2 * keep) / 8) + 4)


def decoded(values: Tensor, keep: int) -> Tensor:
    """The values (n,), fp32, as a receiver has them."""
    result = torch.zeros_like(values)
    for begin in range(0, len(values), CHUNK):
        chunk = values[begin : begin + CHUNK].tolist()
        places = _places(chunk, keep)
        is_large, sizes = _halves(chunk, places, keep)
        for place, large in zip(places, is_large, strict=True):
            result[begin + place] = -sizes[large] if chunk[place] < 0 else sizes[large]
    return result


def message(values: Tensor, keep: int) -> bytes:
    """The message of values (n,), fp32, of which each chunk has at least `keep` that are not zero."""
    parts = []
    for begin in range(0, len(values), CHUNK):
        chunk = values[begin : begin + CHUNK].tolist()
        places, low = _places(chunk, keep), low_bits(keep)
        is_large, sizes = _halves(chunk, places, keep)
        bits, in_bucket = [], Counter(place // 2**low for place in places)
        for bucket in range(CHUNK // 2**low):
            bits += [1] * in_bucket[bucket] + [0]
        bits += [place >> bit & 1 for place in places for bit in range(low)]
        bits += is_large
        bits += [int(chunk[place] < 0) for place in places]
        octets = [bits[first : first + 8] for first in range(0, len(bits), 8)]
        parts.append(bytes(sum(bit << index for index, bit in enumerate(octet)) for octet in octets))
        parts.append(bytes(torch.tensor(sizes).bfloat16().view(torch.uint8).tolist()))
    return b"".join(parts)


def _places(chunk: list[float], keep: int) -> list[int]:
    """The places of the largest values, ascending."""
    return sorted(sorted(range(len(chunk)), key=lambda place: -abs(chunk[place]))[:keep])


def _halves(chunk: list[float], places: list[int], keep: int) -> tuple[list[int], list[float]]:
    """For each place whether its size exceeds the mean of all, and the means of those that do not and that do, in bf16.

    Zeros fill up a chunk that has fewer than `keep` values.
    """
    sizes = [abs(chunk[place]) for place in places] + [0.0] * (keep - len(places))
    mean = sum(sizes) / keep
    is_large = [int(size > mean) for size in sizes]
    means = []
    for flag in (0, 1):
        half = [size for size, large in zip(sizes, is_large, strict=True) if large == flag]
        means.append(sum(half) / max(1, len(half)))
    return is_large[: len(places)], torch.tensor(means).bfloat16().tolist()
