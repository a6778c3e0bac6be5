"""Matrices with given values, and their cuts over a cluster, for the tests of Muon, Shampoo and their owners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.layout.bucket import row_block
from laconic.ragged.spec import RaggedSpec
from tests.support.owner_bytes import sum_over_ranks
from tests.support.sharded_net import specs_of


def random_tensors(shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same on every rank and in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def cut_specs(
    shapes: list[tuple[int, ...]], cluster: Any, *, is_whole: bool = False, per_bucket: int = 3
) -> list[RaggedSpec]:
    """Slots for `shapes`, a few per bucket, in blocks of one row or whole."""
    specs: list[RaggedSpec] = []
    for begin in range(0, len(shapes), per_bucket):
        chosen = shapes[begin : begin + per_bucket]
        blocks = [max(1, math.prod(shape)) if is_whole else row_block(shape) for shape in chosen]
        specs += specs_of(chosen, cluster, blocks)
    return specs


def optimizer_bytes(cluster: Cluster) -> int:
    """Received so far under purpose "optimizer", by all ranks. Collective."""
    snapshot = cluster.traffic.snapshot()
    received, sent = (sum_over_ranks(snapshot.total(purpose="optimizer", direction=d)) for d in ("received", "sent"))
    assert received == sent
    return received
