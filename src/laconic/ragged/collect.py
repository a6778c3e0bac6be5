"""Whole tensors on rank 0, one after the other, for files that rank 0 writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.ragged.dtensor import whole_of
from laconic.ragged.parts import JoinedTensor
from laconic.ragged.redistribute import TransferPlan, whole_on
from laconic.ragged.tensor import RaggedTensor

_AHEAD = 2
"""The number of tensors that may be under way to rank 0 while it takes another."""


@torch.no_grad()
def collect(tensors: Iterable[Tensor]) -> Iterator[Tensor | None]:
    """Yield each of `tensors` whole, in host memory, on rank 0, and None on the other ranks. Collective over all ranks.

    Every rank gives the same tensors in the same order, and takes all results. A result may share its memory with the
    model. Replicas of rank 0's tensors on other islands send nothing.

    Cost: each element enters rank 0 once, counted as "control". Memory for three whole tensors on rank 0; none on the
        other ranks, but for one whole tensor if it is a DTensor that another mesh axis cuts as well.
    """
    started: deque[Callable[[], Tensor | None]] = deque()
    for tensor in tensors:
        started.append(_start(tensor))
        if len(started) > _AHEAD:
            yield started.popleft()()
    while started:
        yield started.popleft()()


def _start(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Begin to send one tensor to rank 0. Returns a function that ends the transfer."""
    if isinstance(tensor, JoinedTensor):
        parts = [_start(part) for part in tensor.parts if part is not None]
        return partial(_join, tensor, parts)
    if isinstance(tensor, RaggedTensor) and tensor.spec.dtensor is None:
        return _start_ragged(tensor)
    if isinstance(tensor, DTensor):
        return partial(_on_rank_0, tensor.full_tensor() if isinstance(tensor, RaggedTensor) else whole_of(tensor))
    return partial(_on_rank_0, tensor)


def _start_ragged(tensor: RaggedTensor) -> Callable[[], Tensor | None]:
    spec, cluster = tensor.spec, tensor.spec.cluster
    first = next((shard for shard in range(cluster.size) if cluster.global_rank(shard) == 0), None)
    if first is None:  # a replica on another island
        return lambda: None
    plan = TransferPlan([spec], [whole_on(spec, first)], "control")
    transfer = plan.start([tensor._local_tensor.to(cluster.device)])

    def finish() -> Tensor | None:
        (whole,) = transfer.wait()
        return _on_rank_0(whole.view(spec.shape) if cluster.shard_index == first else whole)

    return finish


def _join(tensor: JoinedTensor, parts: list[Callable[[], Tensor | None]]) -> Tensor | None:
    wholes = [part() for part in parts]
    return None if wholes[0] is None else tensor.join([whole for whole in wholes if whole is not None])


def _on_rank_0(whole: Tensor) -> Tensor | None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return whole.detach().cpu() if is_first else None
