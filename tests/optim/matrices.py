"""Matrices cut over a cluster, with given values and gradients, for the tests of Muon, Shampoo and their owners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.layout.packing import plan_bucket
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from tests.support.owner_bytes import sum_over_ranks

Shape = tuple[int, ...]


def cut_specs(
    shapes: Sequence[Shape], cluster: Cluster, *, block: int | None = None, per_bucket: int = 3
) -> list[RaggedSpec]:
    """Slots for `shapes`, a few per bucket; blocks of one row by default, 0 for whole tensors."""
    specs: list[RaggedSpec] = []
    for begin in range(0, len(shapes), per_bucket):
        chosen = list(shapes[begin : begin + per_bucket])
        names = [f"t{begin + index}" for index in range(len(chosen))]
        blocks = [_block(shape, block) for shape in chosen]
        layout = plan_bucket(names, chosen, blocks, num_shards=cluster.size, itemsize=4)
        specs += [RaggedSpec(cluster=cluster, layout=layout, index=index) for index in range(len(chosen))]
    return specs


def _block(shape: Shape, block: int | None) -> int:
    if block is None:
        return shape[-1] if len(shape) > 1 else 1
    return max(1, block or math.prod(shape))


def cut(whole: Tensor, spec: RaggedSpec) -> RaggedTensor:
    return RaggedTensor(spec.part_of(whole).clone(), spec)


def random_tensors(shapes: Sequence[Shape], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same on every rank and in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def optimizer_bytes(cluster: Cluster) -> int:
    """Received so far under purpose "optimizer", by all ranks. Collective."""
    snapshot = cluster.traffic.snapshot()
    received = sum_over_ranks(snapshot.total(purpose="optimizer", direction="received"))
    assert received == sum_over_ranks(snapshot.total(purpose="optimizer", direction="sent"))
    return received
