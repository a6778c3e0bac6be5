"""How much a codec may lose."""

from __future__ import annotations

import math
from itertools import pairwise

from laconic.codec.blocked import E2M1, NF4

_STEP = 1 + 2**-8
"""The largest factor by which a step changes in bf16."""
_SCALE = 1 + 2**-7
"""The largest factor by which a scale is rounded up."""


def _even(bits: int, block: int) -> float:
    """Of a block with one large value, whose step is large for the others."""
    return math.sqrt(block) * _STEP / (2 ** (bits - 1) - 1) / 2


def _of_levels(levels: tuple[float, ...], rounding: float, smallest: float, block: int) -> tuple[float, float]:
    """Of rounding between two levels of one sign, and of all but one value of a block that round to zero."""
    between = max(abs((b - a) / (b + a)) for a, b in pairwise(levels) if a * b > 0)
    return between * rounding, smallest / 2 * rounding * math.sqrt(block - 1)


BOUNDS = {  # those of weights behind "weight-"
    "fp32": 0.0,
    "bf16": 2.0**-8,
    "int8": _even(8, 128),
    "int4": _even(4, 128),
    "int2": math.hypot(1.0, 0.9957 * _STEP / 2),  # half a step or, where a value is clipped, the value
    "e2m1": math.hypot(*_of_levels(E2M1, _STEP, E2M1[1] / E2M1[-1], 128)),
    "top64": 1 + 2**-8,  # of values of one size, of which nearly all are left out; magnitudes are rounded to bf16
    "weight-nf4": math.hypot(*_of_levels(NF4, _SCALE, -NF4[6], 64), _SCALE - 1),
    "weight-int8": _even(8, 64),
}
"""The bounds of |decode(encode(x)) - x| / |x| in Euclidean norms, for every finite x that does not underflow."""
