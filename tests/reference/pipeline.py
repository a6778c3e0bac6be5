"""A pipeline in one process: each micro-batch passes all blocks, and some borders between blocks lose bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codec import CODECS, Codec


class Crossing(torch.autograd.Function):
    """A tensor that crosses in few bits, and whose gradient does."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, codec: Codec) -> Tensor:
        ctx.codec = codec
        return as_decoded(values, codec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return as_decoded(gradient, ctx.codec), None


def as_decoded(values: Tensor, codec: Codec) -> Tensor:
    """The values as a receiver decodes them."""
    flat = values.detach().float().reshape(-1)
    return codec.decode(codec.encode(flat), flat.numel()).view(values.shape).to(values.dtype)


def whole_loss(
    model: Iterable[nn.Module],
    tokens: Tensor,
    target: Tensor,
    loss_of: Callable[[Any, Tensor], Tensor],
    *,
    micro_batches: int,
    coded: Collection[int] = (),
    is_alone: bool = False,
) -> Tensor:
    """Add the gradients of the mean loss to `.grad`, micro-batch by micro-batch, and return the loss.

    Args:
        model: the blocks.
        tokens: (rows, ...).
        target: (rows, ...).
        loss_of: the loss of a micro-batch.
        micro_batches: their number.
        coded: the blocks whose inputs come in eight bits, where they need gradients.
        is_alone: leave the gradients alone.
    """
    total = torch.zeros(())
    for part, goal in zip(tokens.chunk(micro_batches), target.chunk(micro_batches), strict=True):
        values: Any = (part,)
        for number, block in enumerate(model):
            if number in coded:
                values = tuple(Crossing.apply(each, CODECS["int8"]) if each.requires_grad else each for each in values)
            values = block(*values)
        loss = loss_of(values, goal) / micro_batches
        if not is_alone:
            loss.backward()
        total += loss.detach()
    return total
