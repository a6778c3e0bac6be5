"""Shampoo by its definition: one process, one block after the other, roots by singular values in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_root(factor: Tensor, exponent: float, ridge: float) -> Tensor:
    u, s, _ = torch.linalg.svd(factor)
    return u @ torch.diag((s + ridge * s.max()) ** -exponent) @ u.T


class Shampoo:
    """Steps on one (rows, columns) matrix in fp64."""

    def __init__(
        self,
        matrix: Tensor,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        block_size: int = 1024,
        update_every: int = 10,
        start_step: int | None = None,
        grafting: str = "adam",
        grafting_eps: float = 1e-8,
        exponent: float = 0.25,
    ) -> None:
        self.matrix = matrix.double()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.update_every, self.start = update_every, start_step or update_every
        self.grafting, self.grafting_eps, self.exponent = grafting, grafting_eps, exponent
        self.moments = [torch.zeros_like(self.matrix) for _ in range(2)]
        rows, columns = matrix.shape
        self.blocks = [
            (slice(top, top + block_size), slice(left, left + block_size))
            for top in range(0, rows, block_size)
            for left in range(0, columns, block_size)
        ]
        self.left = [torch.zeros(len(m), len(m), dtype=torch.float64) for m in (self.matrix[b] for b in self.blocks)]
        self.right = [torch.zeros(m.shape[1], m.shape[1], dtype=torch.float64) for m in map(self._of, self.blocks)]
        self.roots: list[tuple[Tensor, Tensor]] = []
        self.t = 0

    def _of(self, block: tuple[slice, slice]) -> Tensor:
        return self.matrix[block]

    def step(self, grad: Tensor) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        grad = grad.double()
        self.moments[0] = beta1 * self.moments[0] + (1 - beta1) * grad
        self.moments[1] = beta2 * self.moments[1] + (1 - beta2) * grad**2
        for k, block in enumerate(self.blocks):
            g = grad[block]
            self.left[k] = beta2 * self.left[k] + (1 - beta2) * g @ g.T
            self.right[k] = beta2 * self.right[k] + (1 - beta2) * g.T @ g
        correct = 1 - beta2**self.t
        if self.t >= self.start and (self.t - self.start) % self.update_every == 0:
            self.roots = [
                tuple(inverse_root(f / correct, self.exponent, self.eps) for f in pair)  # type: ignore[misc]
                for pair in zip(self.left, self.right, strict=True)
            ]
        average = self.moments[0] / (1 - beta1**self.t)
        squares = self.moments[1] / (correct if self.grafting == "adam" else 1)
        is_scaled = self.grafting in ("adam", "rmsprop")
        grafted = average / (squares.sqrt() + self.grafting_eps) if is_scaled else average
        direction = grafted.clone()
        if self.t >= self.start:
            for block, (left, right) in zip(self.blocks, self.roots, strict=True):
                own = left @ average[block] @ right
                length = own.norm() if self.grafting == "none" else grafted[block].norm()
                direction[block] = own / own.norm() * length
        self.matrix = (1 - self.lr * self.weight_decay) * self.matrix - self.lr * direction
