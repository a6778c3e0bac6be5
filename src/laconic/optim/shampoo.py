"""Shampoo: gradients preconditioned from the left and the right, in blocks, at the step length of a simpler rule.

[Note: Where Shampoo's state lives]
Everything about a matrix lives with its owner: factors, their roots, and the two moments, which the owner needs whole
for the length of the step. So one gradient comes in and one update goes back, and nothing else moves. The owner is
decided when the optimizer first needs it, from shapes and layouts, before any step; checkpoints hold the state under
global coordinates, so another number of ranks may have other owners.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from laconic.optim.matrix import ADAMW, Group, MatrixOptimizer
from laconic.optim.owners import Work
from laconic.ragged.tensor import RaggedTensor

Grafting = Literal["adam", "rmsprop", "sgd", "none"]
_EIGENDECOMPOSITION_FLOPS = 25  # of an n x n matrix, in multiplications per n ** 3, roughly
_TINY = 1e-30


class Shampoo(MatrixOptimizer):
    """Shampoo with blocked preconditioners and grafting, each matrix worked on by one rank; AdamW for the rest.

    Each block G of at most `block_size` rows and columns has factors L and R, running averages of G G^T and G^T G. Its
    step is L^-exponent M R^-exponent, where M is the running average of G, scaled to the length that the grafted rule's
    step has on this block. Vectors, and groups with `algorithm="adamw"`, are AdamW's. Of tensors with more than two
    dimensions, the last two are the matrix's.
    Cost per step: what `Owners` moves, twice, in the parameter's dtype; nothing for matrices that lie whole on a rank.
    State, for blocks of m x n: 2 (m^2 + n^2) + 2 m n numbers in fp32, with the owner: [Note: Where Shampoo's state
    lives]. Every `update_every` steps the owner decomposes its factors.

    Args:
        params: parameters, named parameters, or groups.
        lr: learning rate.
        betas: decay of the average of gradients; of the factors and of squared gradients.
        eps: ridge of a factor, in parts of its largest eigenvalue.
        weight_decay: decoupled.
        block_size: longest side of a block.
        update_every: steps between two computations of the factors' inverse roots.
        start_step: the first step that is preconditioned; before, steps are the grafted rule's. Default: update_every.
        grafting: the rule whose step length is used. "adam"; "rmsprop", which is Adam without correction of its
            squares for the first steps; "sgd", the average of gradients; "none", Shampoo's own length.
        grafting_eps: added to the root of squared gradients, there and in AdamW for vectors.
        exponent: of each factor's inverse; 1/4 is Shampoo's for matrices, 1/2 is common too.

    Raises:
        ValueError: a setting is out of range.

    Source: arXiv 1802.09568; blocks, grafting and periods as in arXiv 2309.06497, relative ridge as in arXiv
    2002.09018. Reference: tests/reference/shampoo.py.
    """

    algorithm = "shampoo"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        block_size: int = 1024,
        update_every: int = 10,
        start_step: int | None = None,
        grafting: Grafting = "adam",
        grafting_eps: float = 1e-8,
        exponent: float = 0.25,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "block_size": block_size,
                "update_every": update_every,
                "start_step": start_step,
                "grafting": grafting,
                "grafting_eps": grafting_eps,
                "exponent": exponent,
            },
        )

    def _check_group(self, group: Group) -> None:
        for key, lowest in (("block_size", 1), ("update_every", 1)):
            if group[key] < lowest:
                raise ValueError(f"{key} must be at least {lowest}, got {group[key]}")
        if group["start_step"] is not None and group["start_step"] < 1:
            raise ValueError(f"start_step must be at least 1, the first step, or None, got {group['start_step']}")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas must lie in [0, 1), got {group['betas']}")
        for key in ("eps", "grafting_eps", "exponent"):
            if not group[key] > 0:
                raise ValueError(f"{key} must be positive, got {group[key]}")
        if group["grafting"] not in get_args(Grafting):
            raise ValueError(f"grafting must be one of {get_args(Grafting)}, got {group['grafting']!r}")

    def _is_matrix(self, parameter: Tensor, group: Group) -> bool:
        return group["algorithm"] != ADAMW and parameter.ndim >= 2

    def _adamw_eps(self, group: Group) -> float:
        return group["eps"] if group["algorithm"] == ADAMW else group["grafting_eps"]

    def _cost(self, shape: torch.Size, group: Group) -> float:
        decomposition = _EIGENDECOMPOSITION_FLOPS / group["update_every"]
        return sum(
            2 * b.rows * b.columns * (b.rows + b.columns) + decomposition * (b.rows**3 + b.columns**3)
            for b in blocks_of(tuple(shape), group["block_size"])
        )

    def _init_matrix(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        blocks = list(blocks_of(tuple(parameter.shape), group["block_size"]))
        left, right = (sum(b.rows**2 for b in blocks),), (sum(b.columns**2 for b in blocks),)
        shapes = {"exp_avg": tuple(parameter.shape), "left": left, "right": right}
        shapes |= {"left_root": left, "right_root": right}
        if group["grafting"] in ("adam", "rmsprop"):
            shapes["exp_avg_sq"] = tuple(parameter.shape)
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key, shape in shapes.items():
            state[key] = self._zeros_on_owner(parameter, key, shape)

    def _zeros_on_owner(self, parameter: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = _computed_in(parameter)
        if not isinstance(parameter, RaggedTensor):
            return torch.zeros(shape, dtype=dtype, device=parameter.device)
        (matrix,) = self._matrices[parameter]
        spec = self.owners.spec_on_owner(matrix, name, shape)
        numel = spec.extent.numel if spec.extent is not None else 0
        return RaggedTensor(torch.zeros(numel, dtype=dtype, device=parameter.to_local().device), spec)

    def _works(self, parameter: Tensor, group: Group) -> list[Work]:
        return [_Preconditioned(parameter, self.state[parameter], group)]


@dataclass(frozen=True, slots=True)
class PreconditionedBlock:
    """A rectangle of a matrix, or of one matrix of a stack, with preconditioners of its own."""

    index: tuple[slice | int, ...]
    """Where it lies in the tensor."""
    rows: int
    columns: int


def blocks_of(shape: tuple[int, ...], size: int) -> Iterator[PreconditionedBlock]:
    """Cut the last two dimensions into blocks of at most `size` x `size`, row by row."""
    *outer, rows, columns = shape
    for stack in itertools.product(*(range(length) for length in outer)):
        for top in range(0, rows, size):
            for left in range(0, columns, size):
                bottom, right = min(top + size, rows), min(left + size, columns)
                yield PreconditionedBlock((*stack, slice(top, bottom), slice(left, right)), bottom - top, right - left)


class _Preconditioned(Work):
    def __init__(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        self.parameter, self.state, self.group = parameter, state, group

    def send(self) -> Tensor:
        self.state["step"] += 1
        assert self.parameter.grad is not None
        return self.parameter.grad

    def work(self, whole: Tensor) -> Tensor:
        group, (beta1, beta2) = self.group, self.group["betas"]
        step = int(self.state["step"])
        grad = whole.to(_computed_in(whole))
        average = self._mine("exp_avg").view(whole.shape).lerp_(grad, 1 - beta1) / (1 - beta1**step)
        grafted = self._grafted(average, grad, step)
        start = group["start_step"] or group["update_every"]
        renew = step >= start and (step - start) % group["update_every"] == 0
        factors, roots = self._per_block("left", "right"), self._per_block("left_root", "right_root")
        direction = torch.empty_like(grad)
        for (block, left, right), (_, left_root, right_root) in zip(factors, roots, strict=True):
            part = grad[block.index]
            left.mul_(beta2).addmm_(part, part.T, alpha=1 - beta2)
            right.mul_(beta2).addmm_(part.T, part, alpha=1 - beta2)
            if renew:
                for factor, root in ((left, left_root), (right, right_root)):
                    root.copy_(inverse_root(factor / (1 - beta2**step), group["exponent"], group["eps"]))
            own = grafted[block.index]
            if step >= start:
                own = left_root @ average[block.index] @ right_root
                if group["grafting"] != "none":
                    own = own * (grafted[block.index].norm() / own.norm().clamp(min=_TINY))
            direction[block.index] = own
        return direction.to(whole.dtype)

    def receive(self, outcome: Tensor) -> None:
        lr = float(self.group["lr"])
        self.parameter.mul_(1 - lr * self.group["weight_decay"])
        self.parameter.add_(outcome, alpha=-lr)

    def _grafted(self, average: Tensor, grad: Tensor, step: int) -> Tensor:
        """The step of the rule whose length is used."""
        if self.group["grafting"] in ("sgd", "none"):
            return average
        beta2 = self.group["betas"][1]
        squares = self._mine("exp_avg_sq").view(grad.shape).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if self.group["grafting"] == "adam":
            squares = squares / (1 - beta2**step)
        return average / (squares.sqrt() + self.group["grafting_eps"])

    def _per_block(self, left: str, right: str) -> list[tuple[PreconditionedBlock, Tensor, Tensor]]:
        """Each block with its (rows, rows) and (columns, columns) parts of two state tensors; views."""
        blocks = list(blocks_of(tuple(self.parameter.shape), self.group["block_size"]))
        lefts = self._mine(left).split([b.rows**2 for b in blocks])
        rights = self._mine(right).split([b.columns**2 for b in blocks])
        return [
            (b, one.view(b.rows, b.rows), other.view(b.columns, b.columns))
            for b, one, other in zip(blocks, lefts, rights, strict=True)
        ]

    def _mine(self, key: str) -> Tensor:
        tensor = self.state[key]
        return tensor.to_local() if isinstance(tensor, RaggedTensor) else tensor


def inverse_root(factor: Tensor, exponent: float, ridge: float) -> Tensor:
    """`factor` to the power of -exponent, its eigenvalues raised by `ridge` times the largest.

    Shapes: (n, n), symmetric, positive semi-definite -> (n, n).
    """
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # fp32 does not converge on some ill-conditioned factors
        values, vectors = (result.to(factor.dtype) for result in torch.linalg.eigh(factor.double()))
    raised = values.clamp(min=0) + (ridge * values[-1]).clamp(min=_TINY)
    return (vectors * raised.pow(-exponent)) @ vectors.T


def _computed_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
