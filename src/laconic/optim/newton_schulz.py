"""Orthogonalisation of a matrix by the quintic Newton-Schulz iteration that Muon uses.

torch's own function in `torch.optim._muon` is private. It normalises a bfloat16 input, such as the momentum, in place.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients, chosen for a steep slope at zero; the default of torch.optim.Muon."""
DTYPE = torch.bfloat16
"""The dtype of the iteration: it rounds its input to this type and returns a result of this type."""


def orthogonalize(
    matrix: Tensor, *, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Move all singular values of `matrix` towards 1: roughly U V^T of its singular value decomposition.

    The operations and their order are those of torch.optim.Muon, and so are the bits of the result.
    Shapes: (rows, columns), any floating dtype -> (rows, columns), bfloat16. `matrix` is not changed.
    Cost: `cost_of` multiplications.
    Source: https://kellerjordan.github.io/posts/muon/. Reference: tests/reference/muon.py.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.to(DTYPE)
    if is_tall:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=eps)  # the spectral norm is at most the Frobenius norm
    for _ in range(steps):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.T if is_tall else wide


def cost_of(rows: int, columns: int, steps: int) -> float:
    """The multiplications of `orthogonalize`: per step two products with the long side and one without it."""
    short, long = sorted((rows, columns))
    return float(steps * short * short * (2 * long + short))
