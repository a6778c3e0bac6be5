"""Shampoo: gradients preconditioned from the left and the right, in blocks, with the step length of a simpler rule.

[Note: Where Shampoo's state lives]
All state of a matrix lives with its owner: the factors, their roots, and the two moments, which the owner needs whole
for the length of the step. So one gradient travels to the owner, one update travels back, and nothing else moves. The
owner is known from shapes and layouts before the first step. Checkpoints hold the state under global coordinates, so
another number of ranks may have other owners. A stack of matrices has one owner. If expert parallelism cuts the stack,
the part on each of its ranks has one. State has the dims of the stack first, so a part's place in it is known too.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from laconic.optim.base import Group, check_range, local_of, zeros_beside
from laconic.optim.joint import stack_state
from laconic.optim.matrix import ADAMW, MatrixOptimizer
from laconic.optim.owners import MatrixWork
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

Grafting = Literal["adam", "rmsprop", "sgd", "none"]
_EIGENDECOMPOSITION_FLOPS = 25
"""Roughly the multiplications to decompose an n x n matrix, divided by n ** 3."""
_FACTORS = ("left", "right", "left_root", "right_root")
_TINY = 1e-30  # avoids divisions by zero


class Shampoo(MatrixOptimizer):
    """Shampoo with blocked preconditioners and grafting, each matrix worked on by one rank; AdamW for the rest.

    A block G has at most `block_size` rows and columns. Its factors L and R are running averages of G G^T and G^T G.
    Its step is L^-exponent M R^-exponent, where M is the running average of G, scaled to the length of the grafted
    rule's step on this block. AdamW takes vectors and groups with `algorithm="adamw"`. In a tensor of more than two
    dims, the last two are those of the matrices. Cost per step: every matrix goes to its owner and back in its dtype,
    but for the elements that the owner holds. A matrix that lies whole on a rank moves nothing. Every `update_every`
    steps the owner decomposes its factors and renews their inverse roots. Expert and tensor parallelism may have cut
    the parameters before: [Note: Matrices over two meshes] in optim/joint.py.
    State, for a block of m x n: 2 (m^2 + n^2) + 2 m n fp32 numbers: [Note: Where Shampoo's state lives].

    Args:
        betas: decay of the average of gradients, and of the factors and squared gradients.
        eps: ridge of a factor, relative to its largest eigenvalue.
        weight_decay: decoupled weight decay.
        start_step: the first preconditioned step; earlier steps follow the grafted rule. None means `update_every`.
        grafting: the rule whose step length is used. "adam"; "rmsprop", which is Adam without bias correction of the
            squares; "sgd", the average of gradients; "none", Shampoo's own length.
        grafting_eps: added to the root of squared gradients, in the grafted rule and in AdamW for vectors.
        exponent: the power of each factor's inverse. Shampoo's own is 1/4 for matrices; 1/2 is common too.

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
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"block_size": block_size, "update_every": update_every, "start_step": start_step}
        defaults |= {"grafting": grafting, "grafting_eps": grafting_eps, "exponent": exponent}
        super().__init__(params, defaults)

    def _check_rule(self, group: Group) -> None:
        check_range(group, "block_size", "update_every", low=1)
        check_range(group, "betas", high=1)
        check_range(group, "eps", "grafting_eps", "exponent", is_open=True)
        if group["start_step"] is not None:
            check_range(group, "start_step", low=1)
        if group["grafting"] not in get_args(Grafting):
            raise ValueError(f"grafting must be one of {get_args(Grafting)}, got {group['grafting']!r}")

    def _needs_whole(self, parameter: Tensor, group: Group) -> bool:
        return super()._needs_whole(parameter, group) and parameter.ndim >= 2

    def _adamw_eps(self, group: Group) -> float:
        return group["eps" if group["algorithm"] == ADAMW else "grafting_eps"]

    def _cost(self, shape: tuple[int, ...], group: Group) -> float:
        return cost_of(shape, group["block_size"], group["update_every"])

    def _itemsize(self, parameter: Tensor) -> int:
        return parameter.dtype.itemsize

    def _init_matrix(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        *stack, rows, columns = parameter.shape
        blocks = list(preconditioned_blocks((rows, columns), group["block_size"]))
        left = (*stack, sum(rows**2 for _, rows, _ in blocks))
        right = (*stack, sum(columns**2 for *_, columns in blocks))
        shapes: dict[str, tuple[int, ...]] = {"exp_avg": tuple(parameter.shape), "left": left, "right": right}
        shapes |= {"left_root": left, "right_root": right}
        if group["grafting"] in ("adam", "rmsprop"):
            shapes["exp_avg_sq"] = tuple(parameter.shape)
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key, shape in shapes.items():
            spec_of = partial(self._spec_on_owner, name=key, shape=shape)
            state[key] = zeros_beside(parameter, shape, _compute_dtype(parameter), spec_of)

    def _spec_on_owner(self, parameter: RaggedTensor, name: str, shape: tuple[int, ...]) -> RaggedSpec:
        (matrix,) = self.matrices[parameter]
        place = stack_state(parameter.spec.dtensor, shape)
        return self.owners.spec_on_owner(matrix, name, shape if place is None else place.local_shape, place)

    def _works(self, parameter: Tensor, group: Group) -> list[MatrixWork]:
        self.state[parameter]["step"] += 1
        (piece,) = self._pieces(parameter)
        return [_Preconditioned(piece, parameter.grad, self.state[parameter], group)]


Block = tuple[slice | int, ...]
"""The index of a rectangle of a matrix, or of one matrix of a stack, which has preconditioners of its own."""


def preconditioned_blocks(shape: tuple[int, ...], size: int) -> Iterator[tuple[Block, int, int]]:
    """Cut the last two dims into blocks of at most `size` x `size`, row by row: (index, rows, columns) of each."""
    *outer, rows, columns = shape
    for stack in itertools.product(*(range(length) for length in outer)):
        for top in range(0, rows, size):
            for left in range(0, columns, size):
                bottom, right = min(top + size, rows), min(left + size, columns)
                yield (*stack, slice(top, bottom), slice(left, right)), bottom - top, right - left


def cost_of(shape: tuple[int, ...], block_size: int, update_every: int) -> float:
    """The multiplications of a step on a matrix, as a mean over steps: products, and the decompositions of factors."""
    decomposition = _EIGENDECOMPOSITION_FLOPS / update_every
    return sum(
        2 * rows * columns * (rows + columns) + decomposition * (rows**3 + columns**3)
        for _, rows, columns in preconditioned_blocks(shape, block_size)
    )


@dataclass
class _Preconditioned(MatrixWork):
    parameter: Tensor
    grad: Any
    state: dict[str, Any]
    group: Group

    def send(self) -> Tensor:
        return self.grad

    def work(self, whole: Tensor) -> Tensor:
        group, (beta1, beta2) = self.group, self.group["betas"]
        step = int(self.state["step"])
        grad = whole.to(_compute_dtype(whole))
        average = local_of(self.state["exp_avg"]).view(whole.shape).lerp_(grad, 1 - beta1) / (1 - beta1**step)
        grafted = self._grafted(average, grad, step)
        start = group["start_step"] or group["update_every"]
        renew = step >= start and (step - start) % group["update_every"] == 0
        direction = torch.empty_like(grad)
        for block, (left, right, left_root, right_root) in self._blocks(tuple(whole.shape)):
            part = grad[block]
            left.mul_(beta2).addmm_(part, part.T, alpha=1 - beta2)
            right.mul_(beta2).addmm_(part.T, part, alpha=1 - beta2)
            if renew:
                for factor, root in ((left, left_root), (right, right_root)):
                    root.copy_(inverse_root(factor / (1 - beta2**step), group["exponent"], group["eps"]))
            update = grafted[block]
            if step >= start:
                update = left_root @ average[block] @ right_root
                if group["grafting"] != "none":
                    update = update * (grafted[block].norm() / update.norm().clamp(min=_TINY))
            direction[block] = update
        return direction.to(whole.dtype)

    def receive(self, outcome: Tensor) -> None:
        lr = float(self.group["lr"])
        self.parameter.mul_(1 - lr * self.group["weight_decay"])
        self.parameter.add_(outcome, alpha=-lr)

    def _grafted(self, average: Tensor, grad: Tensor, step: int) -> Tensor:
        """The step of the grafted rule."""
        if self.group["grafting"] in ("sgd", "none"):
            return average
        beta2 = self.group["betas"][1]
        squares = local_of(self.state["exp_avg_sq"]).view(grad.shape)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if self.group["grafting"] == "adam":
            squares = squares / (1 - beta2**step)
        return average / (squares.sqrt() + self.group["grafting_eps"])

    def _blocks(self, shape: tuple[int, ...]) -> Iterator[tuple[Block, list[Tensor]]]:
        """Each block of the whole with views of its left and right factor and of their roots: square matrices."""
        flat, begins = {key: local_of(self.state[key]) for key in _FACTORS}, dict.fromkeys(_FACTORS, 0)
        for block, rows, columns in preconditioned_blocks(shape, self.group["block_size"]):
            views = []
            for key in _FACTORS:
                side = rows if key.startswith("left") else columns
                begin, begins[key] = begins[key], begins[key] + side**2
                views.append(flat[key][begin : begins[key]].view(side, side))
            yield block, views


def inverse_root(factor: Tensor, exponent: float, ridge: float) -> Tensor:
    """Add `ridge` x its largest eigenvalue to `factor`, positive semi-definite (n, n), and raise it to -exponent."""
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # fp32 does not converge on some ill-conditioned factors
        values, vectors = (result.to(factor.dtype) for result in torch.linalg.eigh(factor.double()))
    raised = values.clamp(min=0) + (ridge * values[-1]).clamp(min=_TINY)
    return (vectors * raised.pow(-exponent)) @ vectors.T


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
