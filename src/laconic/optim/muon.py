"""Muon: orthogonalised momentum, with the maths and the signature of torch.optim.Muon, on sharded parameters.

[Note: The dtype of Muon's transfers]
Newton-Schulz rounds its input to bfloat16 first and returns bfloat16. So matrices travel in bfloat16, in both
directions: rounding before the transfer instead of after it changes no bit, and halves the bytes of an fp32 matrix.

torch's own function in `torch.optim._muon` is private. It normalises a bfloat16 input, such as the momentum, in place.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.optim.base import Group, check_range
from laconic.optim.matrix import ADAMW, MatrixOptimizer
from laconic.optim.owners import MatrixWork

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


_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
_MAX_NS_STEPS = 100
_ADAMW_RMS = 0.2  # the root mean square of AdamW's usual updates (arXiv 2502.16982)


class Muon(MatrixOptimizer):
    """torch.optim.Muon on whole matrices, each worked on by one rank; AdamW for all other parameters.

    Given equal gradients, the results equal those of torch.optim.Muon to the bit, on any number of ranks. The
    parameters of a group are matrices, or stacks of matrices (experts, rows, columns), each orthogonalised on its own.
    Groups with `algorithm="adamw"` are AdamW's. They take `lr` and `weight_decay` from the group or from here, and have
    `betas` (0.9, 0.999) and `eps` 1e-8 unless the group has its own. `matrices_and_rest` makes both groups.
    Cost per step: every matrix goes to its owner and back in bfloat16, but for the elements that the owner holds. A
    matrix that lies whole on a rank moves nothing. Expert parallelism may have cut the stacks before, and tensor
    parallelism the matrices: [Note: Matrices over two meshes] in optim/joint.py.

    Args:
        lr: learning rate, before it is adjusted to the matrix's shape.
        weight_decay: decoupled, times the learning rate before adjustment.
        momentum: decay of the average of gradients.
        nesterov: orthogonalise the gradient, moved towards the average by `momentum`, and not the average itself.
        eps: the smallest norm by which Newton-Schulz divides.
        ns_coefficients, ns_steps: the three coefficients and the number of steps, at most 99, of Newton-Schulz.
        adjust_lr_fn: factor on the learning rate of an A x B matrix. "original" or None: sqrt(max(1, A / B));
            "match_rms_adamw": 0.2 sqrt(max(A, B)); "spectral_unclamped": sqrt(A / B).

    Raises:
        ValueError: a setting is out of range, or a parameter of a Muon group is no matrix.

    Reference: tests/reference/muon.py.
    """

    algorithm = "muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, defaults)

    def _check_rule(self, group: Group) -> None:
        check_range(group, "momentum")
        check_range(group, "eps", is_open=True)
        check_range(group, "ns_steps", high=_MAX_NS_STEPS)
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {group['ns_coefficients']}")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn must be one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")

    def _check_parameter(self, parameter: Tensor, name: str, group: Group) -> None:
        super()._check_parameter(parameter, name, group)
        if self._needs_whole(parameter, group) and parameter.ndim not in (2, 3):
            raise ValueError(
                f"Muon is for matrices, and {name} has shape {tuple(parameter.shape)}; put it into a group with "
                f'algorithm="{ADAMW}" '
                "(laconic.optim.matrices_and_rest(model) sorts parameters)"
            )

    def _cost(self, shape: tuple[int, ...], group: Group) -> float:
        rows, columns = shape
        return cost_of(rows, columns, group["ns_steps"])

    def _itemsize(self, parameter: Tensor) -> int:
        return DTYPE.itemsize  # [Note: The dtype of Muon's transfers]

    def _pieces(self, tensor: Any) -> list[Any]:
        (whole,) = super()._pieces(tensor)
        return [whole] if whole.ndim == 2 else list(whole.unbind())

    def _init_matrix(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        state["momentum_buffer"] = torch.zeros_like(parameter)

    def _works(self, parameter: Tensor, group: Group) -> list[MatrixWork]:
        tensors = parameter, parameter.grad, self.state[parameter]["momentum_buffer"]
        lr = adjusted_lr(float(group["lr"]), group["adjust_lr_fn"], parameter.shape[-2:])
        pieces = zip(*map(self._pieces, tensors), strict=True)
        return [_Orthogonalized(p, grad, momentum_buffer, group, lr) for p, grad, momentum_buffer in pieces]


@dataclass
class _Orthogonalized(MatrixWork):
    parameter: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    group: Group
    adjusted_lr: float

    def send(self) -> Tensor:
        momentum = self.group["momentum"]
        self.momentum_buffer.lerp_(self.grad, 1 - momentum)
        ahead = self.grad.lerp(self.momentum_buffer, momentum) if self.group["nesterov"] else self.momentum_buffer
        return ahead.to(DTYPE)

    def work(self, whole: Tensor) -> Tensor:
        group = self.group
        return orthogonalize(whole, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])

    def receive(self, outcome: Tensor) -> None:
        self.parameter.mul_(1 - float(self.group["lr"]) * self.group["weight_decay"])
        self.parameter.add_(outcome, alpha=-self.adjusted_lr)


def adjusted_lr(lr: float, how: str | None, shape: torch.Size) -> float:
    """The learning rate of a (rows, columns) matrix; `how` is the `adjust_lr_fn` of `Muon`."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * _ADAMW_RMS * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return lr * math.sqrt(ratio if how == "spectral_unclamped" else max(1, ratio))
