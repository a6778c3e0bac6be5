"""The rotation that spreads large values over their neighbours before they are coded in few bits.

[Note: The order of the rotation's sums]
Each value of a run, times the root's inverse, is rounded once; then the run's 32 products are added, or subtracted, one
after the other. A processor's product of two rows and more has that order, since its sums wait in registers, and so
has `tl.dot` without tensor cores in codec/blocked_triton.py. The matrix holds ones, so a fused multiply-add rounds
as a sum does. So a GPU rotates to the bits of a CPU. A single row is doubled: some processors (Intel's, with AVX-512)
have another product for it, of another order. Butterflies would take 5 sums instead of 31, but as operations of
torch they take a CPU almost four times as long as the product.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from laconic.layout.packing import round_up

SIZE = 32
ROOT_INVERSE = SIZE**-0.5


@lru_cache
def rotated_numel(numel: int) -> int:
    """The values that are coded for `numel` values: zeros fill up the last run."""
    return round_up(numel, SIZE)


def rotate(values: Tensor, *, overwrites: bool = False) -> Tensor:
    """Rotate runs of 32 values by the Hadamard matrix of order 32, divided by the root of 32. It is its own inverse.

    With `overwrites`, `values` have no meaning afterwards, which saves a pass over memory.

    Shapes: values (n,), fp32, n a multiple of 32 -> (n,). Source: SDP4Bit (arXiv 2410.15526, section 3.2).
    """
    products = values.mul_(ROOT_INVERSE) if overwrites else values * ROOT_INVERSE
    runs, hadamard = products.view(-1, SIZE), _hadamard(values.device)
    if len(runs) == 1:  # [Note: The order of the rotation's sums]
        return (runs.repeat(2, 1) @ hadamard)[0]
    return (runs @ hadamard).view(-1)


@lru_cache
def _hadamard(device: torch.device) -> Tensor:
    """The Hadamard matrix by Sylvester's construction, (32, 32), of ones and minus ones."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device)
