"""The oracle of cyclic data parallelism: one process, no schedule, no messages.

Every worker computes its gradient with the versions that the rule gives it. Gradients are divided by N and then added
in the order of workers. Then each stage's optimizer steps from the newest version.

With a wire, a sum of gradients that leaves a node is what its receiver decodes, and a new version is what all workers
decode; the optimizer steps exact weights. Every value is coded as in tests/reference/wire.py.

Source: arXiv 2403.08837, equations CDP-v1 and CDP-v2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cyclic.schedule import Rule
from laconic.shard.policies import Wire
from tests.reference.wire import ROTATED, coded

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
        wire: Wire | None = None,
        nodes: Sequence[int] = (),
        states: str = "replicated",
    ) -> None:
        """`nodes` has the node of each device, for a wire."""
        self.wire, self.nodes, self.states = wire or Wire(), nodes, states
        self.has_wire = len(set(nodes)) > 1
        self.lost: dict[tuple[int, int], list[Tensor]] = {}
        self.version = 0  # over all runs
        self.stages, self.loss_fn, self.rule, self.max_grad_norm = stages, loss_fn, rule, max_grad_norm
        self.parameters = [[p for p in stage.parameters() if p.requires_grad] for stage in stages]
        self.optimizers = [optimizer_fn(parameters) for parameters in self.parameters]
        self.restart()

    def restart(self) -> None:
        """End a run, as a drain does: all workers have the newest version, and the next batch begins a run."""
        self.exact = [[p.detach().clone() for p in parameters] for parameters in self.parameters]
        decodes_first = self.states == "sharded" and self.wire.weights != "exact"
        self.newest = [self._crossed(stage) for stage in range(len(self.stages))] if decodes_first else self.exact
        self.older, self.batch = self.newest, 0

    def set(self, **settings: Any) -> None:
        """Set hyper-parameters for the gradients of the next batches."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(settings)

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[Tensor]:
        """Train one batch; worker i has micro-batch i. Returns their losses."""
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
            loss.backward()
            losses.append(loss.detach())
            for stage, parameters in enumerate(self.parameters):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad / count for p in parameters]
                came = [] if worker == 0 else self._sent(sums[stage], worker - 1, stage)
                sums[stage] = grads if worker == 0 else [s + g for s, g in zip(came, grads, strict=True)]
                for p in parameters:
                    p.grad = None
        totals = [self._sent(sums[stage], count - 1, stage) for stage in range(count)]
        if self.max_grad_norm is not None:
            self._clip(sums, totals, self.max_grad_norm)
        for stage, parameters in enumerate(self.parameters):
            self._put(stage, self.exact[stage])
            for p, grad in zip(parameters, totals[stage], strict=True):
                p.grad = grad
            self.optimizers[stage].step()
            for p in parameters:
                p.grad = None
        self.batch, self.version = self.batch + 1, self.version + 1
        self.older, self.exact = self.newest, [[p.detach().clone() for p in ps] for ps in self.parameters]
        self.newest = [self._crossed(stage) for stage in range(count)]
        return losses

    def _crossed(self, stage: int) -> list[Tensor]:
        """A new version of a stage as all workers have it."""
        wire = self.wire
        if not self.has_wire or wire.weights == "exact":
            return self.exact[stage]
        if wire.as_values:
            return [coded_like(value, wire.weights) for value in self.exact[stage]]
        if self.version % wire.exact_every == 0:
            return self.exact[stage]
        return [
            exact if exact.ndim < 2 else old + coded_like(exact - old, wire.weights)
            for exact, old in zip(self.exact[stage], self.newest[stage], strict=True)
        ]

    def _sent(self, sums: list[Tensor], worker: int, stage: int) -> list[Tensor]:
        """A sum of gradients as the next worker has it or, after the last worker, all devices that apply it."""
        wire, last = self.wire, len(self.stages) - 1
        devices = [self._device(worker, stage), self._device(worker + 1, stage)]
        if worker == last:
            devices = [last, self.rule.owner(stage)]
            if self.states == "shared":
                devices = [self._device(each, stage) for each in range(last + 1)]
        if not self.has_wire or wire.gradients == "exact" or len({self.nodes[device] for device in devices}) == 1:
            return sums
        place = (self._device(worker, stage), stage)
        lost = self.lost.get(place, [torch.zeros_like(s) for s in sums])
        whole = [s + rest for s, rest in zip(sums, lost, strict=True)]
        sent = [coded_like(value, wire.gradients) for value in whole]
        if wire.feedback:
            self.lost[place] = [value - own for value, own in zip(whole, sent, strict=True)]
        return sent

    def _device(self, worker: int, stage: int) -> int:
        """The device that has a worker's micro-batch at a stage; devices of shared stages take turns."""
        if self.states != "shared":
            return worker
        count = len(self.stages)
        first, turns = sum(count - j for j in range(stage)), count - stage
        return first + (self.batch * count + worker) % turns

    def _put(self, stage: int, values: list[Tensor]) -> None:
        for p, value in zip(self.parameters[stage], values, strict=True):
            p.data = value.clone()

    def _clip(self, sums: list[list[Tensor]], totals: list[list[Tensor]], max_norm: float) -> None:
        """Clip totals by the norm of `sums`."""
        square = torch.zeros((), dtype=torch.float64)
        for stage_sums in reversed(sums):  # the last stage's sum is complete first
            square = square + torch.stack([s.double().square().sum() for s in stage_sums]).sum()
        factor = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for total in (each for stage_totals in totals for each in stage_totals):
            total.mul_(factor.to(total.dtype))


def coded_like(value: Tensor, codec: str) -> Tensor:
    """Return the value that a receiver decodes. A vector crosses exactly."""
    if value.ndim < 2:
        return value
    return coded(value.flatten(), codec, rotated=codec in ROTATED).view_as(value)
