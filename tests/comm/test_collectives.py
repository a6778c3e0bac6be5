"""Gathers and reductions along a level equal one process, and all bytes are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic import _compat
from laconic.comm.collectives import NOTHING, Communicator, Pending, all_reduce, pass_on, start_flags, swap_rows
from laconic.comm.journal import issue
from laconic.comm.traffic import Purpose, Snapshot, Traffic
from tests.reference import gather as reference
from tests.support.launch import on_ranks, run_ranks

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
            pending = node.all_gather(node_shard, own)
            pending.wait()
            assert (pending is NOTHING) == (n == 1)
            assert torch.equal(node_shard, reference.node_shard_of(bucket, me[1], loc))
            assert_sent(cluster, before, "node", "weights", (n - 1) * C * dtype.itemsize)
            full = torch.full((loc * n * C,), -1, dtype=dtype)
            part = full[me[1] * n * C : (me[1] + 1) * n * C] if in_place else node_shard
            part.copy_(node_shard)
            before = cluster.traffic.snapshot()
            pending = local.all_gather(full, part)
            pending.wait()
            assert (pending is NOTHING) == (loc == 1)
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
        for level, peers in (("node", (n - 1) * loc), ("local", loc - 1)):
            assert delta.total(level, "control", "sent") == 8 * peers, "in one trip"  # type: ignore[arg-type]
        many, before = torch.arange(20_000.0), cluster.traffic.snapshot()
        expected = many * len(ranks) + sum(ranks) if op == dist.ReduceOp.SUM else many + max(ranks)
        assert torch.equal(all_reduce(cluster, many + dist.get_rank(), op), expected)
        delta = cluster.traffic.snapshot() - before
        for level, size in (("node", n), ("local", loc)):
            assert delta.total(level, "control", "sent") == 2 * (size - 1) * many.nbytes // size, "rings"  # type: ignore[arg-type]


@pytest.mark.parametrize("by_sends", [True, False], ids=["sends", "collectives"])
@pytest.mark.parametrize(("num_nodes", "num_local"), [(1, 3), (3, 1), (2, 3)])
def test_gathers_and_reductions_over_two_levels_equal_one_process(
    num_nodes: int, num_local: int, by_sends: bool
) -> None:
    run_ranks(job, num_nodes * num_local, by_sends, local=num_local)


def job_of_unequal_parts(by_sends: bool) -> None:
    """Shards of 3, 5, 7 ... elements. Bytes out are those of R - 1 copies of a part, bytes in those of all others."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    n, loc = cluster.num_nodes, cluster.num_local
    me, own = (cluster.node_rank, cluster.local_rank), cluster.shard_index
    node, local = Communicator(cluster, "node"), Communicator(cluster, "local")
    for communicator in (node, local):
        communicator._uses_sends &= by_sends
    numels = [3 + 2 * (shard * 5 % 7) for shard in range(cluster.size)]
    peers = numels[me[1] * n : (me[1] + 1) * n]
    by_node_shard = [sum(numels[first : first + n]) for first in range(0, len(numels), n)]

    def assert_moved(level: str, purpose: Purpose, sent: int, received: int) -> None:
        delta = cluster.traffic.snapshot() - before
        assert delta.total(level, purpose, "sent") == sent  # type: ignore[arg-type]
        assert delta.total(level, purpose, "received") == received  # type: ignore[arg-type]
        assert delta.total() == sent + received, "nothing else was counted"

    for dtype, in_place in product(DTYPES, (False, True)):
        bucket = data_of_ranks(sum(numels), dtype, cluster)[0, 0]
        shards, size = reference.cut(bucket, numels), dtype.itemsize
        node_shard = torch.full((sum(peers),), -1, dtype=dtype)
        piece = node_shard.split(peers)[me[0]] if in_place else torch.empty(numels[own], dtype=dtype)
        piece.copy_(shards[own])
        before = cluster.traffic.snapshot()
        node.all_gather(node_shard, piece, numels=peers).wait()
        assert_moved("node", "weights", (n - 1) * numels[own] * size, (sum(peers) - numels[own]) * size)
        assert torch.equal(node_shard, torch.cat(shards[me[1] * n : (me[1] + 1) * n]))
        full = torch.full((sum(numels),), -1, dtype=dtype)
        part = full.split(by_node_shard)[me[1]] if in_place else node_shard
        part.copy_(node_shard)
        before = cluster.traffic.snapshot()
        local.all_gather(full, part, numels=by_node_shard).wait()
        assert_moved("local", "weights", (loc - 1) * sum(peers) * size, (sum(numels) - sum(peers)) * size)
        assert torch.equal(full, bucket)

        gradients = data_of_ranks(sum(numels), dtype, cluster, seed=1)
        whole = gradients[me].clone()
        before = cluster.traffic.snapshot()
        inside = local.start_reduce_scatter(whole, numels=by_node_shard)
        assert [len(message) for message in inside.messages] == by_node_shard
        part = inside.finish()
        assert_moved("local", "gradients", (sum(numels) - sum(peers)) * size, (loc - 1) * sum(peers) * size)
        before = cluster.traffic.snapshot()
        total = node.start_reduce_scatter(part, numels=peers).finish()
        assert_moved("node", "gradients", (sum(peers) - numels[own]) * size, (n - 1) * numels[own] * size)
        assert torch.equal(total, reference.cut(reference.sum_over_ranks(gradients), numels)[own])
        assert torch.equal(whole, gradients[me]), "the input is left alone"


@pytest.mark.parametrize("by_sends", [True, False], ids=["sends", "collectives"])
@pytest.mark.parametrize(("num_nodes", "num_local"), [(1, 3), (3, 2)])
def test_parts_of_other_lengths_equal_one_process(num_nodes: int, num_local: int, by_sends: bool) -> None:
    run_ranks(job_of_unequal_parts, num_nodes * num_local, by_sends, local=num_local)


@on_ranks(3)
def test_a_backend_with_lists_gets_unequal_parts_as_lists() -> None:
    """As under NCCL, without `async_op`: this rank's part, and a view of the whole for each rank."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", local=1))
    node, numels = Communicator(cluster, "node"), [2, 7, 4]
    node._uses_sends, node._has_reduce_scatter, node.is_stream_ordered = False, True, True
    issued: list[tuple[str, list[int], int, bool]] = []

    def gather(parts: list[Tensor], piece: Tensor, *, group: Any, async_op: bool) -> None:
        issued.append(("gather", [part.nbytes for part in parts], piece.nbytes, async_op))
        parts[node.rank].copy_(piece)

    def reduce_scatter(landing: Tensor, parts: list[Tensor], *, group: Any, async_op: bool) -> None:
        issued.append(("reduce", [part.nbytes for part in parts], landing.nbytes, async_op))
        landing.copy_(2 * parts[node.rank])

    dist.all_gather, dist.reduce_scatter = gather, reduce_scatter
    whole, own = torch.zeros(13), torch.arange(1.0, 1 + numels[node.rank])
    node.all_gather(whole, own, numels=numels).wait()
    assert torch.equal(whole.split(numels)[node.rank], own), "the parts are views"
    assert torch.equal(node.start_reduce_scatter(whole, numels=numels).finish(), 2 * own)
    nbytes = [4 * numel for numel in numels]
    assert issued == [("gather", nbytes, own.nbytes, False), ("reduce", nbytes, own.nbytes, False)]


@on_ranks(4, local=2)
def test_transfers_overlap_without_mixing() -> None:
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
        pending.wait()
        assert torch.equal(node_shard, reference.node_shard_of(bucket, me[1], cluster.num_local))
    across = [(node.start_reduce_scatter(transfer.finish()), gradients) for transfer, gradients in sums]
    for transfer, gradients in reversed(across):
        assert torch.equal(transfer.finish(), reference.reduce_scatter(gradients)[me])
    traffic = cluster.traffic.snapshot()
    assert traffic.waited_s() >= traffic.waited_s("node") > 0


@on_ranks(3, local=1)
def test_a_transfer_that_is_dropped_early_blocks_no_later_one() -> None:
    """[Note: Messages that nobody awaits]: on Gloo, its message would stay in the socket before all others."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node = Communicator(cluster, "node")
    journal = issue(node._gather_group, "control").journal

    def begin(seed: int) -> tuple[Pending, Tensor, Tensor]:
        shards = data_of_ranks(100_000, torch.float32, cluster, seed)
        arriving = torch.empty(cluster.num_nodes * 100_000)
        return node.all_gather(arriving, shards[cluster.node_rank, 0]), arriving, reference.gather(shards)

    if dist.get_rank() == 0:
        begin(0)  # and drop it, before the other ranks have begun
        dist.barrier()
        assert len(journal.dropped) == 1
    else:
        dist.barrier()
        begin(0)[0].wait()
    pending, arriving, wanted = begin(1)
    pending.wait()
    assert torch.equal(arriving, wanted)
    assert not journal.dropped


def job_replicas() -> None:
    """Islands sum in place."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=dist.get_world_size() // 2, nodes=1))
    island = Communicator(cluster, "island")
    assert (island.rank, island.size) == (cluster.island_rank, cluster.num_islands)
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randint(-9, 9, (C + 1,), generator=generator).to(dtype) for _ in range(island.size)]
        before, own = cluster.traffic.snapshot(), values[island.rank].clone()
        pending = island.start_all_reduce(own)
        pending.wait()
        assert torch.equal(own, sum(values[1:], values[0])), "sums of whole numbers do not round"
        assert_sent(cluster, before, "island", "gradients", 2 * (island.size - 1) * own.nbytes // island.size)
        rounding = torch.randn(C + 1, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        island.start_all_reduce(rounding).wait()
        assert island.all_reduce(rounding.clone(), dist.ReduceOp.MAX).equal(rounding), "all have the same bits"
        own, before = values[island.rank].clone(), cluster.traffic.snapshot()
        for _ in island.sum_in_place(own):
            pass
        assert torch.equal(own, sum(values[1:], values[0]))
        assert_sent(cluster, before, "island", "gradients", 2 * (island.size - 1) * own.nbytes // island.size)
        for _ in island.sum_in_place(rounding):
            pass
        assert island.all_reduce(rounding.clone(), dist.ReduceOp.MAX).equal(rounding), "all have the same bits"
        whole = torch.cat([value[:C] for value in values])
        summed = island.start_reduce_scatter(whole).finish()
        assert torch.equal(summed, values[island.rank][:C] * island.size), "the other transfers serve islands too"


@pytest.mark.parametrize("num_islands", [2, 3, 5])
def test_islands_sum_gradients(num_islands: int) -> None:
    run_ranks(job_replicas, 2 * num_islands, local=2)


def test_a_backend_with_streams_runs_collectives_on_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: the backend's collectives without `async_op`, and an event for the work."""
    issued = set()

    def record(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*tensors: Tensor, async_op: bool, **arguments: Any) -> Any:
            issued.add((name, async_op))
            return collective(*tensors, async_op=async_op, **arguments)

        return issue

    for module, name in ((_compat, "all_gather_flat"), (_compat, "reduce_scatter_flat"), (dist, "all_reduce")):
        monkeypatch.setattr(module, name, record(name, getattr(module, name)))
    run_ranks(job_of_streams, 3)
    assert issued == {("all_gather_flat", False), ("reduce_scatter_flat", False), ("all_reduce", False)}


def job_of_streams() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", local=1))
    node = Communicator(cluster, "node")
    node._uses_sends, node._has_reduce_scatter, node.is_stream_ordered = False, True, True
    shards = data_of_ranks(C, torch.float32, cluster)
    whole, own = torch.empty(C * node.size), shards[node.rank, 0]
    total = whole.clone()
    for pending in (node.all_gather(whole, own), node.start_all_reduce(total.copy_(whole))):
        pending.wait()
    assert torch.equal(whole, reference.gather(shards))
    torch.testing.assert_close(total, whole * node.size)
    torch.testing.assert_close(node.start_reduce_scatter(whole).finish(), own * node.size)


@pytest.mark.machine
@on_ranks(4, local=2)
def test_transfers_show_in_comm_debug_mode() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node, local = Communicator(cluster, "node"), Communicator(cluster, "local")
    module = nn.Linear(2, 2)

    def transfer() -> None:
        for level in (node, local, node):
            level.all_gather(torch.empty(2 * C), torch.empty(C)).wait()
        local.start_reduce_scatter(torch.empty(2 * C)).finish()
        start_flags(cluster, torch.zeros(3, dtype=torch.uint8)).wait()

    module.register_forward_pre_hook(lambda module, args: transfer())
    with CommDebugMode() as mode:
        module(torch.ones(1, 2))
    c10d = torch.ops.c10d
    expected = {c10d._allgather_base_: 3, c10d._reduce_scatter_base_: 1, c10d.alltoall_base_: 1}
    assert mode.get_comm_counts() == expected
    assert mode.comm_module_counts["Linear"]["forward"] == expected
    assert "_allgather_base_" in mode.generate_comm_debug_tracing_table(noise_level=3)
    transfer()
    assert mode.get_total_counts() == 5, "outside it counts nothing"


@on_ranks(2)
def test_one_island_sums_nothing() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    assert Communicator(cluster, "island").start_all_reduce(torch.ones(3)) is NOTHING
    assert cluster.traffic.snapshot().total() == 0


@pytest.mark.parametrize(("world", "local", "islands"), [(1, 1, 1), (3, 3, 1), (4, 2, 1), (6, 1, 3), (8, 2, 2)])
@on_ranks("world", local="local")
def test_flags_are_united(islands: int) -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=islands))
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank - rank % cluster.size
    for across, ranks in ((False, range(first, first + cluster.size)), (True, range(world))):
        under_way = []
        before = cluster.traffic.snapshot()
        for shift in range(3):
            mine = torch.zeros(world + 2, dtype=torch.uint8)
            mine[(rank + shift) % world] = 1
            under_way.append(start_flags(cluster, mine, across_islands=across))
        expected = [torch.zeros(world + 2, dtype=torch.uint8) for _ in range(3)]
        for shift, rank_of_flag in product(range(3), ranks):
            expected[shift][(rank_of_flag + shift) % world] = 1
        assert [flags.wait().tolist() for flags in under_way] == [flags.tolist() for flags in expected]
        delta = cluster.traffic.snapshot() - before
        peers = {
            "local": cluster.num_local - 1,
            "node": cluster.size - cluster.num_local,
            "island": len(ranks) - cluster.size,
        }
        for level, count in peers.items():
            assert delta.total(level, "control", "sent") == 3 * count * (world + 2)  # type: ignore[arg-type]
            assert delta.total(level, "control", "received") == delta.total(level, direction="sent")  # type: ignore[arg-type]
    assert start_flags(cluster, torch.zeros(0, dtype=torch.uint8)).wait().tolist() == []
    for bad in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8, device="meta")):
        with pytest.raises(ValueError, match="flags are a vector of uint8 on the host"):
            start_flags(cluster, bad)


@on_ranks(6, local=1)
def test_rows_are_swapped_and_tensors_passed_on() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=2))
    place = cluster.node_rank * cluster.num_local + cluster.local_rank
    kinds = {False: (place, cluster.size, "node"), True: (cluster.island_rank, cluster.num_islands, "island")}
    for across_islands, (own, size, level) in kinds.items():
        before = cluster.traffic.snapshot()
        rows = torch.arange(size)[:, None] * 10 + own + torch.tensor([0, 2**40])
        got = swap_rows(cluster, rows, across_islands=across_islands)
        assert got.tolist() == [[own * 10 + other, own * 10 + other + 2**40] for other in range(size)]
        assert_sent(cluster, before, level, "control", 16 * (size - 1))
    before = cluster.traffic.snapshot()
    last = (place - 1) % cluster.size
    landings = [torch.empty(last, dtype=torch.bool), torch.empty(2, 3)]
    pass_on(cluster, [torch.ones(place, dtype=torch.bool), torch.full((2, 3), float(place))], landings)
    assert landings[0].all()
    assert (landings[1] == last).all()
    assert (cluster.traffic.snapshot() - before).total("node", "control", "sent") == place + 24


# -- traffic -----------------------------------------------------------------------------------------------------------


def counted() -> Traffic:
    traffic = Traffic()
    traffic.count("node", "weights", sent_bytes=100, received_bytes=101)
    traffic.count("local", "weights", sent_bytes=10, received_bytes=11)
    traffic.count("island", "gradients", sent_bytes=1000, received_bytes=1001)
    traffic.count("node", "gradients", sent_bytes=7, received_bytes=8)
    traffic.count("node", "weights", sent_bytes=100, received_bytes=101)
    return traffic


def test_totals_by_level_purpose_and_direction_and_what_lies_between_snapshots() -> None:
    traffic = counted()
    now = traffic.snapshot()
    assert now.total("node", "weights", "sent") == 200
    assert now.total("node", "weights") == 402
    assert now.total("node", direction="received") == 210
    assert now.total(purpose="gradients", direction="sent") == 1007
    assert now.total() == 2439
    assert now.total("island", "control") == 0
    assert (now.wire(), now.wire("received", "weights")) == (200 + 1000 + 7, 202), "the island and the node level"
    traffic.count("node", "weights", sent_bytes=5, received_bytes=6)
    delta = traffic.snapshot() - now
    assert (delta.total("node", "weights", "sent"), delta.total("island")) == (5, 0)
    assert now.total("node", "weights", "sent") == 200


def test_waiting_is_timed_by_level_even_when_it_fails() -> None:
    traffic = Traffic()

    def lose() -> None:
        with traffic.waiting("local"):
            time.sleep(3)
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose()
    now = traffic.snapshot()
    assert now.waits.keys() == {"local"}
    assert now.waited_s() == now.waited_s("local") >= 3
    assert (traffic.snapshot() - now).waited_s() == Snapshot().waited_s() == 0
