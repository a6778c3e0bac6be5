"""The checksum of memory, word by word, in Python's integers."""

from __future__ import annotations


def checksum(memory: bytes) -> int:
    """The sum of words of four bytes times 1, 3, 5, ..., modulo 2^64, as a signed number."""
    memory += bytes(-len(memory) % 4)
    words = [int.from_bytes(memory[begin : begin + 4], "little", signed=True) for begin in range(0, len(memory), 4)]
    total = sum((2 * index + 1) * word for index, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total
