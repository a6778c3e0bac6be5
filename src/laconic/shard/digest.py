"""A number that tells weights apart."""

from collections.abc import Iterable

import torch
from torch import Tensor

_WORD_BYTES = 8


def digest_of(tensors: Iterable[Tensor]) -> int | None:
    """A number that is equal for equal bits, and hardly ever for others; None if a tensor is on the meta device.

    Cost: one pass over the tensors without copies of them, and one wait for their device.
    """
    total: Tensor | int = 0
    for factor, tensor in enumerate(tensors, start=1):
        if tensor.is_meta:
            return None
        total = total + factor * _sum_of_words(tensor.detach())
    return int(total)


def _sum_of_words(tensor: Tensor) -> Tensor:
    """The sum of a contiguous tensor's memory as integers of eight bytes, modulo 2^64, and of the bytes left over."""
    memory = tensor.reshape(-1).view(torch.uint8)
    if memory.storage_offset() % _WORD_BYTES:  # words must begin at the tensor's first byte on every rank
        memory = memory.clone()
    end = len(memory) // _WORD_BYTES * _WORD_BYTES
    return memory[:end].view(torch.int64).sum() + memory[end:].sum(dtype=torch.int64)
