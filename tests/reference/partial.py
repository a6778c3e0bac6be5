"""The oracle of partial updates: the whole model, full backward, and a mask over gradients and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MaskedTraining:
    """One island. Its coordinates train; the others get no gradient and do not move, under any optimizer."""

    def __init__(
        self,
        model: nn.Module,
        masks: dict[str, Tensor],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
        max_norm: float = float("inf"),
    ) -> None:
        self.model, self.masks, self.loss, self.max_norm = model, masks, loss, max_norm
        self.optimizer = make_optimizer(model.parameters())

    def gradients(self, batches: list[Any]) -> dict[str, Tensor]:
        """The gradients of the mean loss over batches, also in `.grad`; zero where frozen."""
        self.model.zero_grad()
        for batch in batches:
            (self.loss(self.model, batch) / len(batches)).backward()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            parameter.grad *= self.masks[name]
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def step(self, batches: list[Any]) -> Tensor:
        """Returns the norm of the active gradient before clipping."""
        self.gradients(batches)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.where(self.masks[name], parameter, before[name]))
        return norm

    def hand_over(self, masks: dict[str, Tensor]) -> None:
        """Train other coordinates. Coordinates that were not trained so far begin without momentum."""
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter]["momentum_buffer"] *= self.masks[name] & masks[name]
        self.masks = masks


def mask_by_hand(shape: tuple[int, ...], dim: int, active: list[int]) -> Tensor:
    """True where the index along `dim` is listed."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.index_fill_(dim, torch.tensor(active), True)
    return mask
