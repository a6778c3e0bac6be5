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
from laconic.comm import pacing
from laconic.comm.collectives import Communicator, all_reduce, pass_on, start_flags, swap_rows
from laconic.comm.journal import issue
from laconic.comm.moves import NOTHING, Move, Pending
from laconic.comm.pacing import _Pace
from laconic.comm.traffic import Level, Purpose, Snapshot, Traffic
from tests.reference import gather as reference
from tests.support.launch import on_ranks, run_ranks

LEVELS: tuple[Level, ...] = ("node", "local")
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


def gathered(tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank, as bytes."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return [row.view(torch.uint8)[:1000] for row in rows]


def assert_moved(
    cluster: laconic.Cluster, before: Snapshot, level: Level, purpose: Purpose, sent: int, received: int | None = None
) -> None:
    delta = cluster.traffic.snapshot() - before
    received = sent if received is None else received
    assert (delta.total(level, purpose, "sent"), delta.total(level, purpose, "received")) == (sent, received)
    assert delta.total() == sent + received, "nothing else was counted"


@pytest.mark.parametrize("by_sends", [True, False], ids=["sends", "collectives"])
@pytest.mark.parametrize("is_unequal", [False, True])
@pytest.mark.parametrize(("world", "on_node"), [(3, 3), (3, 1), (6, 2)])
@on_ranks("world", local="on_node")
def test_gathers_and_reductions_over_two_levels_equal_one_process(is_unequal: bool, by_sends: bool) -> None:
    """Unequal: shards of 3, 5, 7 ... elements. Out go R - 1 copies of a part, in come those of all others."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    n, loc, me, own = cluster.num_nodes, cluster.num_local, (cluster.node_rank, cluster.local_rank), cluster.shard_index
    assert own == reference.shard_of(me, n)
    node, local = Communicator(cluster, "node"), Communicator(cluster, "local")
    assert (node._uses_sends, local._uses_sends) == (n > 1, loc > 1), "Gloo on CPU"
    for communicator in (node, local):
        communicator._uses_sends &= by_sends
    numels = [3 + 2 * (shard * 5 % 7) if is_unequal else C for shard in range(cluster.size)]
    peers = numels[me[1] * n : (me[1] + 1) * n]
    by_node_shard = [sum(numels[first : first + n]) for first in range(0, len(numels), n)]
    options: list[Any] = [{"numels": each} if is_unequal else {} for each in (peers, by_node_shard)]
    of_peers, of_node_shards = options

    for dtype, in_place in product(DTYPES, (False, True)):
        bucket = data_of_ranks(sum(numels), dtype, cluster)[0, 0]
        shards, size = reference.cut(bucket, numels), dtype.itemsize
        node_shard = torch.full((sum(peers),), -1, dtype=dtype)
        piece = node_shard.split(peers)[me[0]] if in_place else torch.empty(numels[own], dtype=dtype)
        piece.copy_(shards[own])
        before = cluster.traffic.snapshot()
        pending = node.all_gather(node_shard, piece, **of_peers)
        pending.wait()
        assert (pending is NOTHING) == (n == 1)
        sent, received = (n - 1) * numels[own] * size, (sum(peers) - numels[own]) * size
        assert_moved(cluster, before, "node", "weights", sent, received)
        assert torch.equal(node_shard, torch.cat(shards[me[1] * n : (me[1] + 1) * n]))
        full = torch.full((sum(numels),), -1, dtype=dtype)
        part = full.split(by_node_shard)[me[1]] if in_place else node_shard
        part.copy_(node_shard)
        before = cluster.traffic.snapshot()
        local.all_gather(full, part, **of_node_shards).wait()
        inside_sent, inside_received = (loc - 1) * sum(peers) * size, (sum(numels) - sum(peers)) * size
        assert_moved(cluster, before, "local", "weights", inside_sent, inside_received)
        assert torch.equal(full, bucket)

        gradients = data_of_ranks(sum(numels), dtype, cluster, seed=1)
        whole = gradients[me].clone()
        before = cluster.traffic.snapshot()
        inside = local.start_reduce_scatter(whole, **of_node_shards)
        assert [len(message) for message in inside.sent()] == by_node_shard
        kept = loc * sum(peers) * size if not by_sends else inside_sent
        assert inside.nbytes == (kept if loc > 1 else 0)
        part = inside.finish()
        assert_moved(cluster, before, "local", "gradients", inside_received, inside_sent)
        before = cluster.traffic.snapshot()
        total = node.start_reduce_scatter(part, **of_peers).finish()
        assert_moved(cluster, before, "node", "gradients", received, sent)
        assert torch.equal(total, reference.cut(reference.sum_over_ranks(gradients), numels)[own]), "in the same order"
        assert loc == 1 or torch.equal(whole, gradients[me]), "the input is left alone"


@pytest.mark.parametrize(("world", "on_node"), [(6, 2), (6, 3), (4, 1), (3, 3)])
@on_ranks("world", local="on_node")
def test_a_sum_over_replicas_crosses_between_nodes_once_each_way() -> None:
    """Each rank sums a part inside its node. All have the same bits, also of tensors with fewer elements than ranks."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    n, loc, replicas = cluster.num_nodes, cluster.num_local, cluster.replicas
    assert replicas is not None
    me = cluster.node_rank, cluster.local_rank
    for numel, dtype in product((1, 5, 12, 300_001), (torch.float32, torch.bfloat16)):
        terms = data_of_ranks(numel, dtype, cluster)
        total, before = terms[me].clone(), cluster.traffic.snapshot()
        trips = sum(1 for _ in Communicator(replicas, "island").sum_in_place(total))
        if numel == 12 and n > 1 and loc > 1:  # inside, across, and back inside
            assert trips == (3 if n == 2 else 4), "two nodes send all that they have to each other at once"
        near = 0.05 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(total, reference.sum_over_ranks(terms), rtol=near, atol=near)
        assert len({tuple(row.tolist()) for row in gathered(total)}) == 1, "the same bits"
        if n > 1 and loc > 1:
            own_bytes = len(total.tensor_split(loc)[me[1]]) * dtype.itemsize
            sent = (cluster.traffic.snapshot() - before).total("node", "gradients", "sent")
            assert sent == 2 * (n - 1) * own_bytes // n


@pytest.mark.parametrize(("world", "on_node"), [(3, 3), (6, 3)])
@on_ranks("world", local="on_node")
def test_small_sums_take_one_trip_and_others_a_ring() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    rank, n, loc = dist.get_rank(), cluster.num_nodes, cluster.num_local
    for op, combine in ((dist.ReduceOp.SUM, sum), (dist.ReduceOp.MAX, max)):
        before, ranks = cluster.traffic.snapshot(), range(n * loc)
        numbers = torch.tensor([float(rank), -float(rank)])
        assert all_reduce(cluster, numbers, op) is numbers
        assert numbers.tolist() == [combine(ranks), combine(-rank for rank in ranks)]
        delta = cluster.traffic.snapshot() - before
        assert [delta.total(level, "control", "sent") for level in LEVELS] == [8 * (n - 1) * loc, 8 * (loc - 1)]
        many, before = torch.arange(20_000.0), cluster.traffic.snapshot()
        expected = many * len(ranks) + sum(ranks) if op == dist.ReduceOp.SUM else many + max(ranks)
        assert torch.equal(all_reduce(cluster, many + rank, op), expected)
        delta, rings = cluster.traffic.snapshot() - before, [2 * (size - 1) * many.nbytes // size for size in (n, loc)]
        assert [delta.total(level, "control", "sent") for level in LEVELS] == rings


NUMELS = [2, 7, 4]


def gather_lists(parts: list[Tensor], piece: Tensor, *, group: Any, async_op: bool) -> None:
    assert [part.nbytes for part in (*parts, piece)] == [4 * numel for numel in (*NUMELS, NUMELS[dist.get_rank()])]
    parts[dist.get_rank()].copy_(piece)


def sum_lists(landing: Tensor, parts: list[Tensor], *, group: Any, async_op: bool) -> None:
    assert [len(part) for part in (*parts, landing)] == [*NUMELS, NUMELS[dist.get_rank()]]
    landing.copy_(2 * parts[dist.get_rank()])


def test_a_backend_with_streams_runs_collectives_on_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under NCCL: without `async_op`, and unequal parts as lists: this rank's, and a view of the whole for each."""
    issued = set()

    def record(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*tensors: Any, async_op: bool, **arguments: Any) -> Any:
            issued.add((name, async_op))
            return collective(*tensors, async_op=async_op, **arguments)

        return issue

    monkeypatch.setattr(dist, "all_reduce", record("all_reduce", dist.all_reduce))
    for name, bound in (("flat gather", "bound_all_gather"), ("flat sum", "bound_reduce_scatter")):
        monkeypatch.setattr(_compat, bound, record(name, getattr(_compat, bound)))
    for name, collective in (("all_gather", gather_lists), ("reduce_scatter", sum_lists)):
        monkeypatch.setattr(dist, name, record(name, collective))
    run_ranks(job_of_streams, 3)
    names = ("all_gather", "reduce_scatter", "flat gather", "all_reduce", "flat sum")
    assert issued == {(name, False) for name in names}


def job_of_streams() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", local=1))
    node = Communicator(cluster, "node")
    node._uses_sends, node._has_reduce_scatter, node.is_stream_ordered = False, True, True
    whole, own = torch.zeros(13), torch.arange(1.0, 1 + NUMELS[node.rank])
    node.all_gather(whole, own, numels=NUMELS).wait()
    assert torch.equal(whole.split(NUMELS)[node.rank], own), "the parts are views"
    assert torch.equal(node.start_reduce_scatter(whole, numels=NUMELS).finish(), 2 * own)
    shards = data_of_ranks(C, torch.float32, cluster)
    whole, own = torch.empty(C * node.size), shards[node.rank, 0]
    node.all_gather(whole, own).wait()
    assert torch.equal(whole, torch.cat(list(shards.values())))
    total = whole.clone()
    node.start_all_reduce(total).wait()
    torch.testing.assert_close(total, whole * node.size)
    torch.testing.assert_close(node.start_reduce_scatter(whole).finish(), own * node.size)
    buffer = own.clone()
    node.copy_first(buffer)
    assert torch.equal(buffer, shards[0, 0])


@pytest.mark.parametrize(("world", "on_node"), [(4, 2), (3, 1)])
@on_ranks("world", local="on_node")
def test_all_that_is_under_way_arrives_whatever_is_awaited_first(world: int) -> None:
    """Across three nodes in pieces, with more than one agreement on their size."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node, local = Communicator(cluster, "node"), Communicator(cluster, "local")
    (least, me), inner = (
        (pacing._LEAST_BYTES, (cluster.node_rank, cluster.local_rank)),
        local if local.size > 1 else node,
    )
    gathers, sums = [], []
    for numel in (1, least - 1, least, 2 * least + 5) * (1 if local.size > 1 else 4):
        data = data_of_ranks(numel, torch.float32, cluster, numel)
        whole = torch.empty(node.size * numel)
        gathers.append((node.all_gather(whole, data[me]), whole, [data[each, me[1]] for each in range(node.size)]))
        ranks = [(me[0], each) if inner is local else (each, me[1]) for each in range(inner.size)]
        sums.append((inner.start_reduce_scatter(data[me].repeat(inner.size)), [data[rank] for rank in ranks]))
    for pending, whole, parts in reversed(gathers):
        pending.wait()
        assert torch.equal(whole, torch.cat(parts))
    for transfer, terms in reversed(sums):
        torch.testing.assert_close(transfer.finish(), torch.stack(terms).sum(0))
    traffic = cluster.traffic.snapshot()
    assert traffic.waited_s() >= traffic.waited_s("node") > 0


@pytest.mark.parametrize(("world", "shortest"), [(3, 0), (4, 1)])
@on_ranks("world", local=1)
def test_parts_of_other_lengths_travel_in_other_numbers_of_pieces(world: int, shortest: int) -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node, rank = Communicator(cluster, "node"), dist.get_rank()
    assert node._paces
    for factor in (1, 2, 3) * 4:
        numels = [shortest + factor * (other % 3) * pacing._LEAST_BYTES // 4 for other in range(world)]
        wanted = torch.arange(float(sum(numels)))
        whole, own = torch.empty_like(wanted), wanted.split(numels)[rank]
        node.all_gather(whole, own, numels=numels).wait()
        assert torch.equal(whole, wanted)
        total = node.start_reduce_scatter(whole * (1 + rank), numels=numels).finish()
        torch.testing.assert_close(total, own * sum(range(1, world + 1)))


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
def test_a_transfer_that_is_dropped_early_blocks_no_later_one() -> None:
    """[Note: Messages that nobody awaits]: on Gloo, its message would stay in the socket before all others."""
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    node = Communicator(cluster, "node")
    journal = issue(node._gather_group, "control").journal

    def begin(seed: int) -> tuple[Pending, Tensor, Tensor]:
        shards = data_of_ranks(100_000, torch.float32, cluster, seed)
        arriving = torch.empty(cluster.num_nodes * 100_000)
        return node.all_gather(arriving, shards[cluster.node_rank, 0]), arriving, torch.cat(list(shards.values()))

    if dist.get_rank() == 0:
        begin(0)  # and drop it, before the other ranks have begun
        dist.barrier()
        assert len(journal.under_way) == 1
    else:
        dist.barrier()
        begin(0)[0].wait()
    pending, arriving, wanted = begin(1)
    pending.wait()
    assert torch.equal(arriving, wanted)
    assert not journal.under_way


@pytest.mark.parametrize("world", [2, 4, 6])
@on_ranks("world", local=2)
def test_islands_sum_gradients_in_place() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=dist.get_world_size() // 2, nodes=1))
    island = Communicator(cluster, "island")
    assert (island.rank, island.size) == (cluster.island_rank, cluster.num_islands)

    def at_once(tensor: Tensor) -> None:
        pending = island.start_all_reduce(tensor)
        assert (pending is NOTHING) == (island.size == 1)
        pending.wait()

    for dtype, sum_over_islands in product(DTYPES, (at_once, lambda tensor: list(island.sum_in_place(tensor)))):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randint(-9, 9, (C + 1,), generator=generator).to(dtype) for _ in range(island.size)]
        before, own = cluster.traffic.snapshot(), values[island.rank].clone()
        sum_over_islands(own)
        assert torch.equal(own, sum(values[1:], values[0])), "sums of whole numbers do not round"
        sent = 2 * (island.size - 1) * own.nbytes // island.size
        assert_moved(cluster, before, "island", "gradients", sent)
        rounding = torch.randn(C + 1, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        sum_over_islands(rounding)
        assert island.all_reduce(rounding.clone(), dist.ReduceOp.MAX).equal(rounding), "all have the same bits"
        summed = island.start_reduce_scatter(torch.cat([value[:C] for value in values])).finish()
        assert torch.equal(summed, values[island.rank][:C] * island.size), "the other transfers serve islands too"


@pytest.mark.machine
@on_ranks(4, local=2)
def test_transfers_show_in_comm_debug_mode() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    local = Communicator(cluster, "local")

    def transfer(*_: object) -> None:
        for level in (Communicator(cluster, "node"), local):
            level.all_gather(torch.empty(2 * C), torch.empty(C)).wait()
        local.start_reduce_scatter(torch.empty(2 * C)).finish()
        start_flags(cluster, torch.zeros(3, dtype=torch.uint8)).wait()

    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(transfer)
    with CommDebugMode() as mode:
        module(torch.ones(1, 2))
    c10d = torch.ops.c10d
    expected = {c10d._allgather_base_: 2, c10d._reduce_scatter_base_: 1, c10d.alltoall_base_: 1}
    assert mode.get_comm_counts() == mode.comm_module_counts["Linear"]["forward"] == expected
    transfer()
    assert mode.get_total_counts() == 4, "outside it counts nothing"


@pytest.mark.parametrize(("world", "local", "islands"), [(1, 1, 1), (3, 3, 1), (8, 2, 2)])
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
        inside, outside = cluster.num_local - 1, len(ranks) - cluster.size
        peers = {"local": inside, "node": cluster.size - cluster.num_local, "island": outside}
        for level, count in peers.items():
            for direction in ("sent", "received"):
                assert delta.total(level, "control", direction) == 3 * count * (world + 2)  # type: ignore[arg-type]
    assert start_flags(cluster, torch.zeros(0, dtype=torch.uint8)).wait().tolist() == []
    for bad in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8, device="meta")):
        with pytest.raises(ValueError, match="flags are a vector of uint8 on the host"):
            start_flags(cluster, bad)


@on_ranks(6, local=1)
def test_rows_are_swapped_and_tensors_passed_on() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=2))
    place = cluster.node_rank * cluster.num_local + cluster.local_rank
    inside: tuple[Any, ...] = (place, cluster.size, "node")
    for across_islands, (own, size, level) in ((False, inside), (True, (cluster.island_rank, 2, "island"))):
        before = cluster.traffic.snapshot()
        rows = torch.arange(size)[:, None] * 10 + own + torch.tensor([0, 2**40])
        got = swap_rows(cluster, rows, across_islands=across_islands)
        assert got.tolist() == [[own * 10 + other, own * 10 + other + 2**40] for other in range(size)]
        assert_moved(cluster, before, level, "control", 16 * (size - 1))
    before = cluster.traffic.snapshot()
    last = (place - 1) % cluster.size
    landings = [torch.empty(last, dtype=torch.bool), torch.empty(2, 3)]
    pass_on(cluster, [torch.ones(place, dtype=torch.bool), torch.full((2, 3), float(place))], landings)
    assert landings[0].all()
    assert (landings[1] == last).all()
    assert (cluster.traffic.snapshot() - before).total("node", "control", "sent") == place + 24


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_totals_by_level_purpose_and_direction_and_what_lies_between_snapshots() -> None:
    traffic = Traffic()
    traffic.count("node", "weights", sent_bytes=100, received_bytes=101)
    traffic.count("local", "weights", sent_bytes=10, received_bytes=11)
    traffic.count("island", "gradients", sent_bytes=1000, received_bytes=1001)
    traffic.count("node", "gradients", sent_bytes=7, received_bytes=8)
    now = traffic.snapshot()
    assert (now.total("node", "weights", "sent"), now.total("node", "weights")) == (100, 201)
    assert now.total("node", direction="received") == 109
    assert now.total(purpose="gradients", direction="sent") == 1007
    assert (now.total(), now.total("island", "control")) == (2238, 0)
    assert (now.wire(), now.wire("received", "weights")) == (100 + 1000 + 7, 101), "the island and the node level"
    traffic.count("node", "weights", sent_bytes=5, received_bytes=6)
    delta = traffic.snapshot() - now
    assert (delta.total("node", "weights", "sent"), delta.total("island")) == (5, 0)
    assert now.total("node", "weights", "sent") == 100


def test_what_begins_again_counts_as_what_began_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that are made once, of other lengths each time, leave nothing behind but their bytes."""
    traffic, counted, told = Traffic(), (("node", "weights", 3, 5), ("local", "weights", 1, 2)), list[Any]()
    for moves in ([1, 1], [3]):
        for starts in moves:
            move = Move(lambda: None, traffic, "node", None, ("weights", "", None), counted)  # type: ignore[arg-type]
            for _ in range(starts):
                move.start()
    monkeypatch.setattr(Traffic, "observer", lambda *seen: told.append(seen))
    move.start()
    assert told == [("node", "weights", 3), ("local", "weights", 1)], "an observer hears of each"
    sizes = {("node", "sent"): 3, ("node", "received"): 5, ("local", "sent"): 1, ("local", "received"): 2}
    found = {(level, direction): size for (level, _, direction), size in traffic.snapshot().sizes.items()}
    assert found == {key: 6 * size for key, size in sizes.items()}
    assert traffic.begun == {counted: 2}, "of the one that is made again and again"


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
