"""Means of vectors of which each island sends its largest values alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.codec import TopK
from laconic.islands.all_reduce import IslandGroup, mean_over_islands
from tests.reference.sparse import decoded
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

NUMEL = 9001
KEEP = 8


def vector(island: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(island))


def job_means() -> None:
    islands = dist.get_world_size()
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=islands, nodes=1, local=1))
    codec = TopK(keep=KEEP)
    before = cluster.traffic.snapshot()
    of = IslandGroup.of(cluster), codec, cluster.traffic
    mean = mean_over_islands(vector(dist.get_rank()), *of)
    sent = (cluster.traffic.snapshot() - before).total("island", "outer", "sent")
    assert sent == mean.sent_bytes == (islands - 1) * codec.payload_bytes(NUMEL)
    expected = [decoded(vector(island), KEEP) for island in range(islands)]
    torch.testing.assert_close(mean.sent, expected[dist.get_rank()], rtol=1e-2, atol=0)
    torch.testing.assert_close(mean.value, torch.stack(expected).sum(0) / islands, rtol=1e-2, atol=1e-6)
    everyone = [torch.empty(NUMEL) for _ in range(islands)]
    dist.all_gather(everyone, mean.value)
    assert all(torch.equal(theirs, mean.value) for theirs in everyone)

    holders = (torch.arange(NUMEL) % 3).float()  # none, one or two islands train a coordinate
    divided = mean_over_islands(vector(dist.get_rank()), *of, divisor=holders)
    total = torch.stack(expected).sum(0)
    torch.testing.assert_close(
        divided.value, torch.where(holders > 0, total / holders.clamp(min=1), 0.0), rtol=1e-2, atol=1e-6
    )


def test_every_island_gets_the_mean_of_what_all_have_kept() -> None:
    for islands in (2, 3):
        run_ranks(job_means, islands, local=1)
