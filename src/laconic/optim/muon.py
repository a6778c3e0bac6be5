"""Muon: momentum, orthogonalised. torch.optim.Muon's maths and signature, on parameters of which ranks hold parts.

[Note: What Muon sends]
Newton-Schulz begins by rounding its input to bfloat16 and ends in bfloat16. So that is what travels: rounding before
the wire instead of after it changes no bit, and an fp32 matrix costs half its bytes in and half out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laconic.optim import newton_schulz
from laconic.optim.matrix import Group, MatrixOptimizer, name_of
from laconic.optim.owners import Work

_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
_MAX_NS_STEPS = 100


class Muon(MatrixOptimizer):
    """torch.optim.Muon on whole matrices, each worked on by one rank; AdamW for the rest.

    Equal to torch.optim.Muon bit for bit, given equal gradients, on any number of ranks. Parameters of a group are
    matrices, or stacks of them (experts, rows, columns), each orthogonalised on its own. Groups with
    `algorithm="adamw"` are AdamW's, with `lr` and `weight_decay` as given to the group or here, and `betas` (0.9,
    0.999) and `eps` 1e-8 unless the group says otherwise; see `matrices_and_rest`.
    Cost per step: what `Owners` moves, twice, in bfloat16; nothing for matrices that lie whole on a rank.

    Args:
        params: parameters, named parameters, or groups.
        lr: learning rate before it is adjusted to the matrix's shape.
        weight_decay: decoupled, by the unadjusted learning rate.
        momentum: of the average of gradients.
        nesterov: orthogonalise the gradient with momentum ahead of it, not the average.
        ns_coefficients, ns_steps, eps: of Newton-Schulz; at most 99 steps.
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
        ns_coefficients: tuple[float, float, float] = newton_schulz.COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )

    def _check_group(self, group: Group) -> None:
        if group["momentum"] < 0:
            raise ValueError(f"momentum must not be negative, got {group['momentum']}")
        if not 0 <= group["ns_steps"] < _MAX_NS_STEPS:
            raise ValueError(f"ns_steps must be at least 0 and below {_MAX_NS_STEPS}, got {group['ns_steps']}")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {group['ns_coefficients']}")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn must be one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
        for index, parameter in enumerate(group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"Muon is for matrices, and {name_of(group, index)} has shape {tuple(parameter.shape)}; put it "
                    'into a group with algorithm="adamw" (laconic.optim.matrices_and_rest(model) sorts parameters)'
                )

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] if tensor.ndim == 2 else [tensor[index] for index in range(tensor.shape[0])]

    def _cost(self, shape: torch.Size, group: Group) -> float:
        rows, columns = shape
        return newton_schulz.cost_of(rows, columns, group["ns_steps"])

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        return newton_schulz.DTYPE  # [Note: What Muon sends]

    def _init_matrix(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        state["momentum_buffer"] = torch.zeros_like(parameter)

    def _works(self, parameter: Tensor, group: Group) -> list[Work]:
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
        pieces = zip(*(self._pieces(tensor) for tensor in tensors), strict=True)
        return [_Orthogonalized(p, grad, buffer, group) for p, grad, buffer in pieces]


class _Orthogonalized(Work):
    def __init__(self, parameter: Tensor, grad: Tensor, momentum_buffer: Tensor, group: Group) -> None:
        self.parameter, self.grad, self.momentum_buffer, self.group = parameter, grad, momentum_buffer, group

    def send(self) -> Tensor:
        momentum = self.group["momentum"]
        self.momentum_buffer.lerp_(self.grad, 1 - momentum)
        ahead = self.grad.lerp(self.momentum_buffer, momentum) if self.group["nesterov"] else self.momentum_buffer
        return ahead.to(newton_schulz.DTYPE)

    def work(self, whole: Tensor) -> Tensor:
        group = self.group
        return newton_schulz.orthogonalize(
            whole, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"]
        )

    def receive(self, outcome: Tensor) -> None:
        lr = float(self.group["lr"])
        self.parameter.mul_(1 - lr * self.group["weight_decay"])
        self.parameter.add_(outcome, alpha=-adjusted_lr(lr, self.group["adjust_lr_fn"], self.parameter.shape))


def adjusted_lr(lr: float, how: str | None, shape: torch.Size) -> float:
    """The learning rate of a (rows, columns) matrix."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return lr * math.sqrt(ratio if how == "spectral_unclamped" else max(1, ratio))
