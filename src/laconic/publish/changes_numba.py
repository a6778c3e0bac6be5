"""The changes of a version on a CPU, compiled by numba: each function is one loop over its values.

Their twins are operations of torch: in changes.py.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# numba types the functions that it compiles

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.codec.loops import compiled
from laconic.publish.changes import FACTORS

_compiled = compiled(repr(FACTORS).encode())
_PLACE, _FIRST, _SECOND = (np.uint64(factor % 2**64) for factor in FACTORS)
_RUN = 4
"""The values that are compared at once, as one word of 64 bits: few of them change, so most words are passed over."""


def taken_over(held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """See `take_over`. Shapes: (n,), int16 -> (c,), int32, and (c,), int16."""
    places, before = np.empty(len(held) + 1, np.int32), np.empty(len(held) + 1, np.int16)
    held_words, new_words = _words(held, new)
    num = _take_over(held.numpy(), new.numpy(), held_words, new_words, places, before)
    return torch.from_numpy(places[:num].copy()), torch.from_numpy(before[:num].copy())


def _words(*each: Tensor) -> list[np.ndarray]:
    """Their whole words; none if a tensor has gaps, or begins between two words of memory."""
    are_aligned = all(bits.is_contiguous() and bits.data_ptr() % (2 * _RUN) == 0 for bits in each)
    return [
        bits.numpy()[: len(bits) // _RUN * _RUN].view(np.int64) if are_aligned else np.empty(0, np.int64)
        for bits in each
    ]


def digest_of_run(bits: Tensor, start: int) -> int:
    """See `run_digest`. Shapes: (n,), int16."""
    return int(_digest_of_run(_unsigned(bits), np.uint64(start)))


def digest_of_places(places: Tensor, bits: Tensor) -> int:
    """See `digest_at`. Shapes: (n,), int64, and (n,), int16."""
    if places.shape != bits.shape:
        raise IndexError(f"{tuple(bits.shape)} values have {tuple(places.shape)} places")
    return int(_digest_of_places(places.numpy(), _unsigned(bits)))


def _unsigned(bits: Tensor) -> np.ndarray:
    return bits.numpy().view(np.uint16)


def gaps_of(positions: Tensor) -> Tensor:
    """See `encode_gaps`. Shapes: (c,), int64 -> (g,), uint8 or uint16, whichever is fewer bytes."""
    places = positions.numpy()
    numbers = [len(places) + int(_jumps(places, np.iinfo(dtype).max)) for dtype in (np.uint8, np.uint16)]
    dtype = np.uint8 if numbers[0] <= 2 * numbers[1] else np.uint16
    gaps = np.empty(numbers[dtype is np.uint16], dtype)
    _gaps(places, np.iinfo(dtype).max, gaps)
    return torch.from_numpy(gaps)


def positions_of(gaps: Tensor, start: int, num: int, numel: int) -> Tensor | None:
    """See `decode_gaps`: `num` places, (c,), int64, or None if the gaps do not lead to as many in order."""
    places = np.empty(num, np.int64)
    found = _places(gaps.numpy(), torch.iinfo(gaps.dtype).max, start, min(numel, 2**63 - 1), places)
    return torch.from_numpy(places) if found == num else None


@_compiled
def _take_over(held, new, held_words, new_words, places, before):
    num = 0
    for word in range(len(held_words)):
        if held_words[word] != new_words[word]:
            num = _note(held, new, _RUN * word, _RUN * (word + 1), places, before, num)
            held_words[word] = new_words[word]
    rest = _RUN * len(held_words)
    num = _note(held, new, rest, len(held), places, before, num)
    held[rest:] = new[rest:]
    return num


@_compiled
def _note(held, new, begin, end, places, before, num):
    """Store each value, and overwrite it if it did not change: no branch is guessed wrong."""
    for i in range(begin, end):
        places[np.uint64(num)], before[np.uint64(num)] = i, held[i]
        num += held[i] != new[i]
    return num


@_compiled
def _mixed(place, pattern):
    number = np.uint64(place) * _PLACE + np.uint64(pattern)
    number = (number ^ (number >> np.uint64(32))) * _FIRST
    return (number ^ (number >> np.uint64(29))) * _SECOND


@_compiled
def _digest_of_run(patterns, start):
    total = np.uint64(0)
    for i in range(len(patterns)):
        total += _mixed(start + np.uint64(i), patterns[i])
    return total


@_compiled
def _digest_of_places(places, patterns):
    total = np.uint64(0)
    for i in range(len(places)):
        total += _mixed(places[i], patterns[i])
    return total


@_compiled
def _jumps(places, largest):
    """The gaps without a change that lead over long distances."""
    num = 0
    for i in range(1, len(places)):
        distance = places[i] - places[i - 1]
        if distance >= largest:  # a division takes longer than all else
            num += distance // largest
    return num


@_compiled
def _gaps(places, largest, gaps):
    num = 0
    for i in range(len(places)):
        distance = places[i] - places[max(i - 1, 0)]
        while distance >= largest:
            gaps[num] = largest
            num += 1
            distance -= largest
        gaps[num] = distance
        num += 1


@_compiled
def _places(gaps, largest, start, numel, places):
    num, at, last = 0, start, -1
    for i in range(len(gaps)):
        at += gaps[i]
        if gaps[i] < largest:
            if num == len(places) or not last < at < numel:
                return -1
            places[num], last = at, at
            num += 1
    return num
