"""Shampoo by its definition: one process, one block after the other, roots by singular values in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inverse_root(factor: Tensor, exponent: float, ridge: float) -> Tensor:
    u, s, _ = torch.linalg.svd(factor)
    return u @ torch.diag((s + ridge * s.max()) ** -exponent) @ u.T


class Shampoo:
    """Shampoo on one (rows, columns) matrix in fp64. Settings are those of `laconic.optim.Shampoo`."""

    lr, betas, eps, weight_decay = 1e-3, (0.9, 0.999), 1e-6, 0.0
    block_size, update_every, start_step = 1024, 10, None
    grafting, grafting_eps, exponent = "adam", 1e-8, 0.25

    def __init__(self, matrix: Tensor, **settings: Any) -> None:
        self.__dict__.update(settings)
        self.matrix = matrix.double()
        self.start = self.start_step or self.update_every
        self.moments = [torch.zeros_like(self.matrix) for _ in range(2)]
        rows, columns = matrix.shape
        self.blocks = [
            (slice(top, top + self.block_size), slice(left, left + self.block_size))
            for top in range(0, rows, self.block_size)
            for left in range(0, columns, self.block_size)
        ]
        sizes = [self.matrix[block].shape for block in self.blocks]
        self.left = [torch.zeros(height, height, dtype=torch.float64) for height, _ in sizes]
        self.right = [torch.zeros(width, width, dtype=torch.float64) for _, width in sizes]
        self.roots: list[tuple[Tensor, Tensor]] = []
        self.t = 0

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
