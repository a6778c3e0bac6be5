"""Muon as the pseudo-code of its author has it: one process, one matrix after the other."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon:
    """Muon on (rows, columns) matrices and stacks of them. Settings are those of torch.optim.Muon."""

    lr, weight_decay, momentum, nesterov, adjust_lr_fn = 1e-3, 0.1, 0.95, True, "original"

    def __init__(self, parameters: list[Tensor], **settings: Any) -> None:
        self.__dict__.update(settings)
        self.parameters = parameters
        self.averages = [torch.zeros_like(p) for p in parameters]

    def step_some(self, grads: dict[int, Tensor]) -> None:
        """Step the parameters that have a gradient, by index."""
        for index, grad in grads.items():
            tensors = (self.parameters[index], self.averages[index], grad)
            for p, m, g in zip(*(t if t.ndim == 3 else t[None] for t in tensors), strict=True):
                m.lerp_(g, 1 - self.momentum)
                direction = orthogonalize(g.lerp(m, self.momentum) if self.nesterov else m)
                p.mul_(1 - self.lr * self.weight_decay)
                p.add_(direction, alpha=-self.lr * self.factor(*p.shape))

    def factor(self, rows: int, columns: int) -> float:
        return {
            "original": math.sqrt(max(1, rows / columns)),
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
            "spectral_unclamped": math.sqrt(rows / columns),
        }[self.adjust_lr_fn]
