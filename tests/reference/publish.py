"""Published weights by hand: gaps and digests in Python's integers, and a reader without laconic.

`apply` is the reader that docs/publish-format.md shows. It knows the format alone, and checks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def apply(folder: Path, state: dict[str, Tensor], kind: str) -> None:
    """Write a version into whole tensors, in place: all of it (kind "whole"), or what has changed (kind "patch")."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {file["name"]: load_file(folder / file["name"]) for file in manifest["files"]}
    for tensor in manifest["tensors"]:
        for part in tensor[kind]:
            data, start, key = files[part["file"]], part["start"], part["key"]
            target = state[tensor["name"]].view(-1) if len(start) == 1 else state[tensor["name"]]
            if part["encoding"] == "gaps":
                gaps = data[key + ".gaps"]
                is_change = gaps.long() < torch.iinfo(gaps.dtype).max
                target[start[0] + gaps.long().cumsum(0)[is_change]] = data[key + ".values"]
            else:  # "dense"
                box = tuple(slice(begin, begin + size) for begin, size in zip(start, part["sizes"], strict=True))
                target[box] = data[key].view(part["sizes"])


def gaps_of(positions: Sequence[int], jump: int) -> list[int]:
    """The numbers that lead from each position to the next, the first from itself; `jump` goes on without a change."""
    numbers: list[int] = []
    at = positions[0] if positions else 0
    for position in positions:
        while position - at >= jump:
            numbers.append(jump)
            at += jump
        numbers.append(position - at)
        at = position
    return numbers


def positions_of(start: int, numbers: Sequence[int], jump: int) -> list[int]:
    """The reverse of `gaps_of`."""
    positions, at = [], start
    for number in numbers:
        at += number
        if number < jump:
            positions.append(at)
    return positions


def digest(patterns: Sequence[int], start: int = 0) -> int:
    """The sum of a mixture of each element's place and bits, modulo 2^64. Patterns are numbers without sign."""
    total = 0
    for place, pattern in enumerate(patterns, start):
        number = (pattern + place * 0x9E3779B97F4A7C15) % 2**64
        number = (number ^ (number >> 32)) * 0xD6E8FEB86659FD93 % 2**64
        number = (number ^ (number >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
        total += number
    return total % 2**64
