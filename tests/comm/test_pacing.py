"""Exchanges that travel in pieces: odd sizes, several under way, the agreement on a size, and what is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.comm import pacing
from laconic.comm.collectives import Communicator
from laconic.comm.pacing import _Pace
from tests.support.launch import on_ranks

_SIZES = (1, pacing._LEAST_BYTES - 1, pacing._LEAST_BYTES, 2 * pacing._LEAST_BYTES + 5)


def _of(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel))


def _across_nodes() -> Communicator:
    return Communicator(laconic.Cluster.of(laconic.init_mesh("cpu", nodes=dist.get_world_size(), local=1)), "node")


@pytest.mark.parametrize("world", [3])
@on_ranks("world", local=1)
def test_all_that_is_under_way_arrives_whatever_is_awaited_first(world: int) -> None:
    node, rank = _across_nodes(), dist.get_rank()
    gathers: list[tuple[int, Tensor, Any]] = []
    for numel in _SIZES * 4:  # more than one agreement on the size of pieces
        whole = torch.empty(world * numel)
        gathers.append((numel, whole, node.all_gather(whole, _of(rank, numel))))
        gathers.append((numel, torch.cat([_of(rank, numel)] * world), None))
    sums = [node.start_reduce_scatter(whole) for _, whole, pending in gathers if pending is None]
    for (numel, _, _), total in reversed(list(zip(gathers[1::2], sums, strict=True))):
        expected = torch.stack([_of(other, numel) for other in range(world)])
        torch.testing.assert_close(total.finish(), expected.sum(0))
    for numel, whole, pending in gathers[::2]:
        pending.wait()
        assert torch.equal(whole, torch.cat([_of(other, numel) for other in range(world)]))


@pytest.mark.parametrize(("world", "shortest"), [(3, 0), (4, 1)])
@on_ranks("world", local=1)
def test_parts_of_other_lengths_travel_in_other_numbers_of_pieces(world: int, shortest: int) -> None:
    node, rank = _across_nodes(), dist.get_rank()
    assert node._paces
    for factor in (1, 2, 3) * 4:  # more than one agreement on the size of pieces
        numels = [shortest + factor * (other % 3) * pacing._LEAST_BYTES // 4 for other in range(world)]
        whole, wanted = torch.empty(sum(numels)), torch.cat([_of(other, numels[other]) for other in range(world)])
        node.all_gather(whole, _of(rank, numels[rank]), numels=numels).wait()
        assert torch.equal(whole, wanted)
        total = node.start_reduce_scatter(whole * (1 + rank), numels=numels).finish()
        torch.testing.assert_close(total, _of(rank, numels[rank]) * sum(range(1, world + 1)))


@on_ranks(3, local=1)
def test_pieces_have_the_size_of_the_slowest_rank() -> None:
    group, pace = dist.group.WORLD, _Pace()
    assert group is not None
    for rates, expected in (((2e9, 5e8, 1e9), 5_000_000), ((1e3, 1e9, 1e9), 1 << 17), ((1e12, 1e12, 1e12), 1 << 23)):
        pace.note(int(rates[dist.get_rank()]), 1.0)
        pace.note(1, 1.0)  # some exchange was late
        pace.agree(group, tag=7)
        assert pace.piece_bytes == expected
    begun = [pace.begin() for _ in range(40)]
    assert [index for index, is_due in enumerate(begun) if is_due] == [8, 16, 32]


@on_ranks(3, local=1)
def test_an_exchange_that_nobody_awaits_blocks_no_later_one() -> None:
    node, rank = _across_nodes(), dist.get_rank()
    for _ in range(3):
        node.all_gather(torch.empty(3 * 70_000), _of(rank, 70_000))
    whole = torch.empty(3 * 5)
    node.all_gather(whole, _of(rank, 5)).wait()
    assert torch.equal(whole, torch.cat([_of(other, 5) for other in range(3)]))
