from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.comm.collectives import Communicator, all_reduce
from laconic.comm.traffic import Purpose
from tests.ranks import run_ranks
from tests.reference import gather as reference
from tests.shard.helpers import MESHES

C = 12
"""Elements per shard."""
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def data_of_ranks(
    numel: int, dtype: torch.dtype, cluster: laconic.Cluster, seed: int = 0
) -> dict[reference.Rank, Tensor]:
    """Random values for every rank, whose sums round. Every rank computes them all."""
    generator = torch.Generator().manual_seed(seed)
    ranks = product(range(cluster.num_nodes), range(cluster.num_local))
    return {rank: torch.randn(numel, generator=generator).to(dtype) for rank in ranks}


def assert_sent(cluster: laconic.Cluster, before: object, level: str, purpose: Purpose, nbytes: int) -> None:
    delta = cluster.traffic.snapshot() - before  # type: ignore[operator]
    for direction in ("sent", "received"):
        assert delta.total(level, purpose, direction) == nbytes, (level, direction)  # type: ignore[arg-type]
    assert delta.total() == 2 * nbytes, "nothing else was counted"


def job(by_sends: bool) -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    n, loc = cluster.num_nodes, cluster.num_local
    me = (cluster.node_rank, cluster.local_rank)
    assert cluster.shard_index == reference.shard_of(me, n)
    node, local = Communicator(cluster, "node"), Communicator(cluster, "local")
    assert node._uses_sends == (n > 1)  # Gloo on CPU
    assert local._uses_sends == (loc > 1)
    for communicator in (node, local):
        communicator._uses_sends &= by_sends
    for dtype in DTYPES:
        shards = data_of_ranks(C, dtype, cluster)
        bucket = reference.gather(shards)
        for in_place in (False, True):
            node_shard = torch.full((n * C,), -1, dtype=dtype)
            own = node_shard[me[0] * C : (me[0] + 1) * C] if in_place else torch.empty(C, dtype=dtype)
            own.copy_(shards[me])
            before = cluster.traffic.snapshot()
            if pending := node.all_gather(node_shard, own):
                pending.wait()
            assert (pending is None) == (n == 1)
            assert torch.equal(node_shard, reference.node_shard_of(bucket, me[1], loc))
            assert_sent(cluster, before, "node", "weights", (n - 1) * C * dtype.itemsize)
            full = torch.full((loc * n * C,), -1, dtype=dtype)
            part = full[me[1] * n * C : (me[1] + 1) * n * C] if in_place else node_shard
            part.copy_(node_shard)
            before = cluster.traffic.snapshot()
            if pending := local.all_gather(full, part):
                pending.wait()
            assert (pending is None) == (loc == 1)
            assert torch.equal(full, bucket)
            assert_sent(cluster, before, "local", "weights", (loc - 1) * n * C * dtype.itemsize)

        gradients = data_of_ranks(C * n * loc, dtype, cluster, seed=1)
        whole = gradients[me].clone()
        before = cluster.traffic.snapshot()
        inside = local.start_reduce_scatter(whole)
        part = inside.finish()
        assert_sent(cluster, before, "local", "gradients", (loc - 1) * n * C * dtype.itemsize)
        before = cluster.traffic.snapshot()
        shard = node.start_reduce_scatter(part).finish()
        assert_sent(cluster, before, "node", "gradients", (n - 1) * C * dtype.itemsize)
        assert torch.equal(shard, reference.reduce_scatter(gradients)[me]), "the order of sums is part of the contract"
        if loc > 1:
            assert inside.nbytes == ((loc - 1) * n * C * dtype.itemsize if by_sends else whole.nbytes)
            assert torch.equal(whole, gradients[me]), "the input is left alone"
        else:
            assert inside.nbytes == 0

    for op, combine in ((dist.ReduceOp.SUM, sum), (dist.ReduceOp.MAX, max)):
        before = cluster.traffic.snapshot()
        numbers = torch.tensor([float(dist.get_rank()), -float(dist.get_rank())])
        assert all_reduce(cluster, numbers, op) is numbers
        ranks = range(n * loc)
        assert numbers.tolist() == [combine(ranks), combine(-rank for rank in ranks)]
        delta = cluster.traffic.snapshot() - before
        for level, size in (("node", n), ("local", loc)):
            assert delta.total(level, "control", "sent") == 2 * (size - 1) * 8 // size  # type: ignore[arg-type]


@pytest.mark.parametrize("by_sends", [True, False], ids=["sends", "collectives"])
@pytest.mark.parametrize(("num_nodes", "num_local"), MESHES)
def test_gathers_and_reductions_over_two_levels_equal_one_process(
    num_nodes: int, num_local: int, by_sends: bool
) -> None:
    run_ranks(job, num_nodes * num_local, by_sends, local=num_local)


def job_overlap() -> None:
    """Several transfers are under way at once; they begin in one order and finish in another."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node, local = Communicator(cluster, "node"), Communicator(cluster, "local")
    me = (cluster.node_rank, cluster.local_rank)
    gathers = []
    for seed in range(4):
        shards = data_of_ranks(C, torch.float32, cluster, seed)
        node_shard = torch.empty(cluster.num_nodes * C)
        gathers.append((node.all_gather(node_shard, shards[me]), node_shard, reference.gather(shards)))
    sums = []
    for seed in range(3):
        gradients = data_of_ranks(C * cluster.size, torch.float32, cluster, seed)
        sums.append((local.start_reduce_scatter(gradients[me]), gradients))
    for pending, node_shard, bucket in reversed(gathers):
        assert pending is not None
        pending.wait()
        assert torch.equal(node_shard, reference.node_shard_of(bucket, me[1], cluster.num_local))
    across = [(node.start_reduce_scatter(transfer.finish()), gradients) for transfer, gradients in sums]
    for transfer, gradients in reversed(across):
        assert torch.equal(transfer.finish(), reference.reduce_scatter(gradients)[me])
    traffic = cluster.traffic.snapshot()
    assert traffic.waited_s() >= traffic.waited_s("node") > 0


def test_transfers_overlap_without_mixing() -> None:
    run_ranks(job_overlap, 4, local=2)
