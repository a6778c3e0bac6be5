"""The oracle of cyclic data parallelism: one process, no schedule, no messages.

Every worker computes its gradient with the versions that the rule gives it. Gradients are divided by N and then added
in the order of workers. Then each stage's optimizer steps from the newest version.

Source: arXiv 2403.08837, equations CDP-v1 and CDP-v2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cyclic.schedule import Rule

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Oracle:
    """N stages trained by N workers under a rule."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer_fn: MakeOptimizer,
        rule: Rule,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.stages, self.loss_fn, self.rule, self.max_grad_norm = stages, loss_fn, rule, max_grad_norm
        self.scaler, self.scale, self.good_batches = grad_scaler, 1.0, 0
        if grad_scaler is not None:
            self.scale = grad_scaler.get_scale()
        self.unseen: list[bool] = []
        self.parameters = [[p for p in stage.parameters() if p.requires_grad] for stage in stages]
        self.optimizers = [optimizer_fn(parameters) for parameters in self.parameters]
        self.restart()

    def restart(self) -> None:
        """End a run, as a drain does: all workers have the newest version, and the next batch begins a run."""
        self.newest = [[p.detach().clone() for p in parameters] for parameters in self.parameters]
        self.older = self.newest
        while self.unseen:
            self._see(self.unseen.pop(0))

    def set(self, **settings: Any) -> None:
        """Set hyper-parameters for the gradients of the next batches."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(settings)

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[Tensor]:
        """Train one batch; worker i has micro-batch i. Returns their losses."""
        if len(self.unseen) == 2:
            self._see(self.unseen.pop(0))  # an overflow changes the scale two batches later
        count, sums, losses = len(self.stages), [[] for _ in self.stages], []
        for worker, (inputs, targets) in enumerate(micro_batches):
            for stage in range(count):
                chosen = self.newest if self.rule.is_fresh(worker, stage) else self.older
                self._put(stage, chosen[stage])
            hidden = inputs if isinstance(inputs, tuple) else (inputs,)
            for stage in self.stages:
                hidden = stage(*hidden)
                hidden = hidden if isinstance(hidden, tuple) else (hidden,)
            loss = self.loss_fn(hidden if len(hidden) > 1 else hidden[0], targets)
            (loss * self.scale).backward()
            losses.append(loss.detach())
            for stage, parameters in enumerate(self.parameters):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad / count for p in parameters]
                sums[stage] = grads if worker == 0 else [s + g for s, g in zip(sums[stage], grads, strict=True)]
                for p in parameters:
                    p.grad = None
        self.older = self.newest
        if not self._ready(sums):
            return losses
        for stage, parameters in enumerate(self.parameters):
            self._put(stage, self.newest[stage])
            for p, grad in zip(parameters, sums[stage], strict=True):
                p.grad = grad
            self.optimizers[stage].step()
            for p in parameters:
                p.grad = None
        self.newest = [[p.detach().clone() for p in parameters] for parameters in self.parameters]
        return losses

    def _put(self, stage: int, values: list[Tensor]) -> None:
        for p, value in zip(self.parameters[stage], values, strict=True):
            p.data = value.clone()

    def _ready(self, sums: list[list[Tensor]]) -> bool:
        """Undo the loss scale and clip; False if the batch overflowed."""
        square = torch.zeros((), dtype=torch.float64)
        for stage_sums in reversed(sums):  # the last stage's sum is complete first
            square = square + torch.stack([s.double().square().sum() for s in stage_sums]).sum()
        if self.scaler is not None:
            self.unseen.append(bool(torch.isfinite(square)))
            if not self.unseen[-1]:
                return False
            self._multiply(sums, torch.tensor(1 / self.scale))
        if self.max_grad_norm is not None:
            norm = square.sqrt() * (1 / self.scale)
            self._multiply(sums, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return True

    def _multiply(self, sums: list[list[Tensor]], factor: Tensor) -> None:
        for stage_sums in sums:
            for s in stage_sums:
                s.mul_(factor.to(s.dtype))

    def _see(self, is_finite: bool) -> None:
        """Update the scale by the rule of torch.amp.GradScaler."""
        assert self.scaler is not None
        self.good_batches = self.good_batches + 1 if is_finite else 0
        if not is_finite:
            self.scale *= self.scaler.get_backoff_factor()
        elif self.good_batches == self.scaler.get_growth_interval():
            self.scale, self.good_batches = self.scale * self.scaler.get_growth_factor(), 0
