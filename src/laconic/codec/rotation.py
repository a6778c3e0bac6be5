"""A rotation that spreads large values over their neighbours, so that few bits serve all of them."""

from functools import lru_cache

import torch
from torch import Tensor

SIZE = 32


def rotate(values: Tensor) -> Tensor:
    """Rotate runs of 32 values by the Hadamard matrix of order 32, divided by the root of 32. It is its own inverse.

    Shapes: values (n,), fp32, n a multiple of 32 -> (n,). Source: SDP4Bit (arXiv 2410.15526, section 3.2).
    """
    return (values.view(-1, SIZE) @ _hadamard(values.device)).view(-1)


@lru_cache
def _hadamard(device: torch.device) -> Tensor:
    """The Hadamard matrix by Sylvester's construction, (32, 32), orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / SIZE**0.5).to(device)
