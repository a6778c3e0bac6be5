"""The bytes of messages in few bits, by the rules of [Note: Payloads] in codec/payload.py."""

from collections.abc import Callable, Iterable

ALIGNMENT = 16
_BLOCK = 128
Run = tuple[int, int, bool]
"""The values [begin, end) of a message that lie in one tensor, and whether it is a vector, which travels in fp32."""


def int4_bytes(numel: int, multiple: int = 1) -> int:
    """The bytes of values in four bits, filled up to a multiple."""
    numel = -(-numel // multiple) * multiple
    return -(-numel // 2) + 2 * -(-numel // _BLOCK)


def int8_bytes(numel: int) -> int:
    """The bytes of values in eight bits."""
    return numel + 2 * -(-numel // _BLOCK)


def message_bytes(runs: Iterable[Run], coded_bytes: Callable[[int], int]) -> int:
    """The bytes of a message: a run joins the one before it that ends with a whole block; each piece begins aligned."""
    pieces: list[Run] = []
    for begin, end, is_vector in runs:
        if pieces:
            first, last, was_vector = pieces[-1]
            if last == begin and was_vector == is_vector and (is_vector or (begin - first) % _BLOCK == 0):
                pieces[-1] = first, end, is_vector
                continue
        if begin < end:
            pieces.append((begin, end, is_vector))
    sizes = [4 * (end - begin) if is_vector else coded_bytes(end - begin) for begin, end, is_vector in pieces]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
