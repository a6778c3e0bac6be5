"""Numbers that stand for memory: a checksum that sees every flipped bit, and a digest that tells weights apart.

[Note: What a checksum sees]
The checksum of a part is the sum of its words of four bytes, as signed numbers x_i, times the odd numbers 2 i + 1,
modulo 2^64; zeros fill up the last word. An odd factor keeps the number of a change's trailing zero bits,
so every change within one word is seen. Two flipped bits a and b of words i and j would cancel only if 2^a (2 i + 1)
equals 2^b (2 j + 1), or its negative, modulo 2^64: then a equals b, which is below 32, and i equals j, in parts of less
than 8 GiB. So any two flipped bits are seen, and so is the exchange of any two words. Any other damage is missed once
in 2^64 times, if it is random. tests/reference/checksum.py says the same in Python's integers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_WORD_BYTES = 4
_DIGEST_WORD_BYTES = 8
_HOST_CHUNK_WORDS, _DEVICE_CHUNK_WORDS = 1 << 15, 1 << 22
"""The words that are multiplied at once: on a CPU they and their products fit its caches."""


def checksums(parts: Tensor) -> Tensor:
    """The checksums of parts of one tensor: [Note: What a checksum sees].

    Shapes: parts (P, n), of any dtype -> (P,), int64, on the same device, for which nobody waits.
    Cost: one pass over the memory, and one copy if it is not contiguous, or does not consist of whole words.
    Reference: tests/reference/checksum.py.
    """
    if not parts.numel():
        return torch.zeros(len(parts), dtype=torch.int64, device=parts.device)
    words = _words(parts.detach().contiguous().view(torch.uint8))
    num_parts, num_words = words.shape
    size = max(1, (_HOST_CHUNK_WORDS if words.device.type == "cpu" else _DEVICE_CHUNK_WORDS) // max(1, num_parts))
    first = torch.arange(min(size, num_words), device=words.device) * 2 + 1
    total = torch.zeros(num_parts, dtype=torch.int64, device=words.device)
    for begin in range(0, num_words, size):
        chunk = words[:, begin : begin + size]
        total += chunk.long().mul_(first[: chunk.shape[1]] + 2 * begin).sum(1)
    return total


def checksum_of(tensor: Tensor) -> Tensor:
    """The checksum of a whole tensor, (): see `checksums`."""
    return checksums(tensor.detach().reshape(1, -1))[0]


def _words(memory: Tensor) -> Tensor:
    """Bytes, (P, n), uint8, as words, (P, ceil(n / 4)), int32; zeros fill up the last word of a part."""
    num_bytes = memory.shape[1]
    num_words = -(-num_bytes // _WORD_BYTES)
    if num_bytes % _WORD_BYTES or memory.storage_offset() % _WORD_BYTES:  # torch views whole words at their places only
        filled = memory.new_zeros(len(memory), num_words * _WORD_BYTES)
        filled[:, :num_bytes] = memory
        memory = filled
    return memory.view(-1).view(torch.int32).view(-1, num_words)


def digest_of(tensors: Iterable[Tensor]) -> int | None:
    """A number that is equal for equal bits, and hardly ever for others; None if a tensor is on the meta device.

    Cost: one pass over the tensors without copies of them, and one wait for their device.
    """
    total: Tensor | int = 0
    for factor, tensor in enumerate(tensors, start=1):
        if tensor.is_meta:
            return None
        total = total + factor * _sum_of_long_words(tensor.detach())
    return int(total)


def _sum_of_long_words(tensor: Tensor) -> Tensor:
    """The sum of a contiguous tensor's memory as integers of eight bytes, modulo 2^64, and of the bytes left over."""
    memory = tensor.reshape(-1).view(torch.uint8)
    if memory.storage_offset() % _DIGEST_WORD_BYTES:  # words must begin at the tensor's first byte on every rank
        memory = memory.clone()
    end = len(memory) // _DIGEST_WORD_BYTES * _DIGEST_WORD_BYTES
    return memory[:end].view(torch.int64).sum() + memory[end:].sum(dtype=torch.int64)
