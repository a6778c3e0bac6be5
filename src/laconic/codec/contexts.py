"""Contexts, which both sides know before a difference is coded, and their codes: the numbers that all coders share.

[Note: Lossless differences] in codec/lossless.py says why.
"""

from __future__ import annotations

BLOCK = 512
"""The values that share a scale."""
TILE = 4096
"""The values with words of their own."""
CLASSES = 24
"""The contexts."""
IDLE = CLASSES
"""The context of values whose block has not changed."""
RICE_CODES, RAW, NONE, BUCKETS = 14, 14, 15, 16
"""Codes: 0 to 13 is Rice with so many low bits; RAW is for the tiles that are sent as patterns, NONE for idle values;
BUCKETS + m is a bucket of 2**m values."""
BUCKET_BITS = (1, 2, 3, 4, 6, 8, 10)
"""The sizes of buckets, m. Those between cost at most 0.007 bits a value less."""
CODE, FLIP = 31, 32
"""The bits of a code, and the one that says that minus comes first, which older payloads have."""
MAX_QUOTIENT, MAX_EVENTS = 16, 4
"""The unary number, and the events of a value, that mean: the pattern follows."""
MAX_LEVEL = 15
LOWEST_BASE = -MAX_LEVEL
"""Of the scales of a tile. The highest is 255 above, so a byte holds each."""
STEP_BITS = 12
"""The bits below one ulp in the sum of a block."""
MAX_STEP = (8 << STEP_BITS) - 1
"""Of one value in that sum, so that a jump says little about its block."""
_ZERO_CLASS = 9  # log2(BLOCK): the class of a mean step of one ulp
CODES = (
    *(BUCKETS + m for m in (10, 8, 6, 6, 4, 4, 3, 2)), 0,
    *(min(step - _ZERO_CLASS, RICE_CODES - 1) for step in range(_ZERO_CLASS, CLASSES)),
)  # fmt: skip
"""The code of each context, for the steps that its class says."""


def head_bytes(numel: int) -> int:
    """The bytes of a payload before the codes that it names: [Note: Codes that decode in parallel] in lossless.py."""
    num_blocks = -(-numel // BLOCK)
    return 5 * -(-numel // TILE) + -(-num_blocks // 2) + CLASSES
