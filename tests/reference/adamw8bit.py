"""AdamW with 8-bit moments on whole tensors, one tile after the other. laconic.optim.AdamW8bit must equal it."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 codes: 7 decades of doubling resolution, each cut evenly with a code in the middle of each part."""
    numbers = [0.0, 1.0]
    for power in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (power + 6 + (0 if signed else 1)) + 1, dtype=torch.float64) * 10.0**power
        for low, high in itertools.pairwise(edges):
            middle = float((low + high) / 2)
            numbers += [middle, -middle] if signed else [middle]
    return torch.tensor(sorted(numbers), dtype=torch.float32)


def dice(bits: Tensor) -> Tensor:
    """For each int64 a multiple of 1/4096 from 0 up to 1: a hash of its last 32 bits."""
    mixed = bits * 0x85EBCA6B % 2**32
    mixed = mixed - 2**32 * (mixed >= 2**31)
    mixed = (mixed ^ (mixed >> 15)) * 0xC2B2AE35 % 2**32
    return (mixed >> 20) / 4096


def encode(values: Tensor, signed: bool, *, step: int, width: int) -> tuple[Tensor, Tensor]:
    """The codes and the scale of one block.

    A value between two numbers of the map takes the upper one if it lies above a border. The value's bits, its place in
    the block and the step draw the border. A second moment becomes 0 only if it is 0.
    """
    table = dynamic_map(signed)
    scale = values.abs().max()
    ratio = (values / scale if scale > 0 else values).contiguous()
    below = ((ratio[..., None] > table).sum(-1) - 1).clamp(0, 254)
    gaps = table[below + 1] - table[below]
    if not signed:
        gaps = gaps.where(below > 0, 0.0)
    index = torch.arange(ratio.numel()).view(ratio.shape)
    columns = ratio.shape[-1]
    place = index // columns * width + index % columns
    border = gaps * dice(ratio.view(torch.int32).long() + place + step * 0x85EBCA6B) + table[below]
    return (below + (ratio > border)).to(torch.uint8), scale


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    return dynamic_map(signed)[codes.long()] * scale


def blocks(shape: tuple[int, ...], tile: int | None, flat: int) -> list[tuple[slice, ...]]:
    """The blocks of a tensor, as a matrix whose rows are all dims but the last, or as a vector."""
    numel = math.prod(shape)
    if tile is None or len(shape) < 2:
        return [(slice(begin, min(begin + flat, numel)),) for begin in range(0, numel, flat)]
    rows, columns = numel // shape[-1], shape[-1]
    return [
        (slice(top, min(top + tile, rows)), slice(left, min(left + tile, columns)))
        for top in range(0, rows, tile)
        for left in range(0, columns, tile)
    ]


class ReferenceAdamW8bit:
    """The optimizer with one group of parameters."""

    def __init__(
        self,
        parameters: list[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        tile: int | None = 32,
        flat: int = 256,
        min_8bit_size: int = 4096,
    ) -> None:
        self.parameters, self.lr, self.betas, self.eps, self.weight_decay = parameters, lr, betas, eps, weight_decay
        self.tile, self.flat, self.min_8bit_size = tile, flat, min_8bit_size
        self.state: list[dict[Any, Any]] = [{} for _ in parameters]
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> None:
        self.steps += 1
        for parameter, gradient, state in zip(self.parameters, gradients, self.state, strict=True):
            shape = tuple(parameter.shape)
            if parameter.numel() < self.min_8bit_size:
                state.setdefault("m", torch.zeros(shape))
                state.setdefault("v", torch.zeros(shape))
                self._adamw(parameter, gradient, state["m"], state["v"])
                continue
            for block in blocks(shape, self.tile, self.flat):
                width = self.tile or self.flat
                view = (-1, shape[-1]) if len(block) == 2 else (-1,)
                values = parameter.view(view)[block]
                if str(block) in state:
                    m, v = (decode(*coded, signed) for coded, signed in zip(state[str(block)], (True, False)))  # noqa: B905
                else:
                    m, v = torch.zeros(values.shape), torch.zeros(values.shape)
                self._adamw(values, gradient.view(view)[block], m, v)
                state[str(block)] = tuple(
                    encode(moment, signed, step=self.steps, width=width) for moment, signed in ((m, True), (v, False))
                )

    def _adamw(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        """Take one step. Every operation rounds once, so no grouping of elements can change a bit."""
        beta1, beta2 = self.betas
        p32, g = p.float(), g.float()
        m.copy_(m * beta1 + g * (1 - beta1))
        v.copy_(v * beta2 + (g * g) * (1 - beta2))
        root = v.double().sqrt().float()  # torch's fp32 root on CPU is not always the correctly rounded one
        denominator = root * (1 / math.sqrt(1 - beta2**self.steps)) + self.eps
        p.copy_(p32 * (1 - self.lr * self.weight_decay) - (m / denominator) * (self.lr / (1 - beta1**self.steps)))
