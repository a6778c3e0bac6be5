"""Parameters of which several stages have copies: an embedding and a head.

[Note: Tied parameters]
An embedding and a head that share a parameter are on the first and on the last stage. Each has a copy, with a gradient
of its own. Before the optimizer steps, the ranks that hold copies add these up, in the order of stages, so all have the
same bits. Equal weights with equal gradients and equal states stay equal. A rank holds a part of each copy. Copies that
are cut alike exchange these parts. Otherwise a rank gathers its own gradient, and sends each other rank its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.comm.agreement import RankGroup
from laconic.comm.launch import node_of_rank
from laconic.comm.traffic import Level, Traffic
from laconic.comm.watch import waiting_for
from laconic.ragged.tensor import RaggedTensor


class Tie:
    """The copies of one parameter on several stages: [Note: Tied parameters]."""

    def __init__(
        self,
        members: Sequence[tuple[int, str]],
        places: Sequence[int],
        modules: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        ranks: RankGroup,
        traffic: Traffic,
    ) -> None:
        """Find this rank's copies. Collective over the ranks of the pipeline.

        Args:
            members: the copies, as (stage, name), in the order of stages.
            places: the place in the pipeline of each stage.
            modules: this rank's stages.
            group: the ranks of the pipeline, in the order of places.
            ranks: the same ranks, for small messages.
            traffic: counts the bytes, as "gradients".
        """
        self._group, self._traffic, self._rank = group, traffic, dist.get_rank(group)
        self.copies = [modules[stage].get_parameter(name) for stage, name in members if stage in modules]
        """This rank's copies."""
        self._holders = list(dict.fromkeys(places[stage] for stage, _ in members))
        """The places of the ranks that have copies."""
        tables: list[Any] = ranks.gather([[_table(each), _held(each)] for each in self.copies])
        kinds = [table for place in self._holders for table, _ in tables[place]]
        self._is_cut_alike = all(table == kinds[0] for table in kinds)
        self._parts = {place: [held for _, held in tables[place]] for place in self._holders}
        """The elements of each copy of each of these ranks."""

    @property
    def further_copies(self) -> list[nn.Parameter]:
        """This rank's copies without the first of all, whose gradient stands for all in a norm."""
        return self.copies[1:] if self._holders[0] == self._rank else self.copies

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add up the gradients of all copies, on all of them. Collective over the stages that have some."""
        if not self.copies or not self.copies[0].requires_grad:
            return
        gradients = [_gradient_of(each) for each in self.copies]
        own = torch.stack([self._flat(each) for each in gradients]).sum(0)
        received = self._exchange(own)
        for number, (gradient, held) in enumerate(zip(gradients, self._parts[self._rank], strict=True)):
            summands = (
                self._part(own, held) if place == self._rank else received[place][number] for place in self._holders
            )
            total = torch.stack(list(summands)).sum(0)
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.copy_(total.view(local.shape))

    def _flat(self, gradient: Tensor) -> Tensor:
        """A gradient, flat: this rank's part where all copies are cut alike, else all of it."""
        if not isinstance(gradient, DTensor):
            return gradient.reshape(-1)
        return (gradient.to_local() if self._is_cut_alike else gradient.full_tensor()).as_subclass(Tensor).reshape(-1)

    def _part(self, flat: Tensor, held: Sequence[int]) -> Tensor:
        return flat if self._is_cut_alike else flat[held[0] : held[1]]

    def _exchange(self, own: Tensor) -> dict[int, list[Tensor]]:
        """Send each other rank the elements of its copies, and return what it sends of ours, by its place."""
        ops, received = [], dict[int, list[Tensor]]()
        for place in self._holders:
            if place == self._rank:
                continue
            received[place] = [torch.empty_like(self._part(own, held)) for held in self._parts[self._rank]]
            sent = [self._part(own, held).contiguous() for held in self._parts[place]]
            for kind, tensors in ((dist.irecv, received[place]), (dist.isend, sent)):
                ops += [dist.P2POp(kind, each, group=self._group, group_peer=place) for each in tensors if each.numel()]
        for op in ops:
            level: Level = "local" if node_of_rank(op.peer) == node_of_rank(dist.get_rank()) else "node"
            sent_bytes = op.tensor.nbytes if op.op is dist.isend else 0
            self._traffic.count(level, "gradients", sent_bytes=sent_bytes, received_bytes=op.tensor.nbytes - sent_bytes)
        with waiting_for("the sum of tied gradients"):
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        return received


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of a copy, of zeros where its stage had no use for it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _held(parameter: Tensor) -> list[int]:
    """The first of the elements that this rank holds, and the one behind the last."""
    held = parameter.spec.held if isinstance(parameter, RaggedTensor) else None
    return _all_of(parameter) if held is None else [held.start, held.stop]


def _table(parameter: Tensor) -> list[list[int]]:
    """The elements that each rank of a parameter's mesh holds."""
    if not isinstance(parameter, RaggedTensor):
        return [_all_of(parameter)]
    held = (parameter.spec.held_by(shard) for shard in range(parameter.spec.cluster.size))
    return [[each.start, each.stop] for each in held]


def _all_of(parameter: Tensor) -> list[int]:
    """As of the elements of a plain tensor. FSDP2 cuts copies in equal chunks of rows, so they are cut alike."""
    return [0, (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()]
