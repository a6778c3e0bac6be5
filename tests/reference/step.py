"""The oracle of `fully_shard`: a training step over N x L ranks, in one process.

Weights are rounded to the compute dtype; every rank's gradient is rounded to the reduce dtype; gradients are summed
over a node's ranks for each micro-batch, then over micro-batches in float32 at least, rounded again, summed over nodes,
and divided once by the number of ranks. Nothing is sharded, cached or overlapped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]
"""A function from a model and one rank's micro-batch to the loss."""


class Oracle:
    """A whole model in one process that trains as the ranks of a cluster do."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        num_nodes: int,
        num_local: int,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.loss = copy.deepcopy(model), loss
        self.num_nodes, self.num_local = num_nodes, num_local
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype or param_dtype

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the master weights by name, each tied weight once."""
        return dict(self.model.named_parameters())

    def worker(self) -> nn.Module:
        """Return a copy of the model in the compute dtype."""
        worker = copy.deepcopy(self.model)
        for parameter in worker.parameters():
            if self.param_dtype is not None:
                parameter.data = parameter.data.to(self.param_dtype)
        return worker

    def one_rank(self, worker: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute one rank's loss and gradients for one micro-batch."""
        for parameter in worker.parameters():
            parameter.grad = None
        loss = self.loss(worker, batch)
        loss.backward()
        gradients = {name: p.grad for name, p in worker.named_parameters() if p.grad is not None}
        return loss.detach(), gradients

    def gradients(self, micro_batches: Sequence[Sequence[Any]]) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
        """Compute losses and averaged gradients of `micro_batches[a][rank]`. Changes nothing."""
        losses: list[list[Tensor]] = []
        nodes: list[dict[str, Tensor]] = [{} for _ in range(self.num_nodes)]
        worker = self.worker()  # one for all: a copy of a model takes longer than its step
        for batches in micro_batches:
            results = [self.one_rank(worker, batch) for batch in batches]
            losses.append([loss for loss, _ in results])
            for node, total in enumerate(nodes):
                ranks = range(node * self.num_local, (node + 1) * self.num_local)
                for name, value in _sum([self._rounded(results[rank][1]) for rank in ranks]).items():
                    total[name] = total[name] + value if name in total else _wide(value)
        rounded = [self._rounded(total) for total in nodes]
        averaged = {name: value / (self.num_nodes * self.num_local) for name, value in _sum(rounded).items()}
        masters = self.parameters()
        return losses, {name: value.to(masters[name].dtype) for name, value in averaged.items()}

    def _rounded(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: g if self.reduce_dtype is None else g.to(self.reduce_dtype) for name, g in gradients.items()}


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _sum(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add dicts name by name, in the given order. A rank without a gradient adds zero."""
    total: dict[str, Tensor] = {}
    for row in rows:
        for name, value in row.items():
            total[name] = total[name] + value if name in total else value.clone()
    return total
