"""Ranks as threads of one process: transfers, turns, deadlocks, faults, and what each rank has for itself."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import laconic
from laconic import rehearse
from laconic.rehearse import DeadlockError, Kill, RankError
from laconic.rehearse.mail import Letter


def _start() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def test_every_rank_has_the_environment_of_torchrun() -> None:
    def job() -> tuple[str, ...]:
        return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"))

    before = dict(os.environ)
    assert rehearse.ranks(job, nodes=2, local=2) == [(str(r), str(r % 2), str(r // 2), "4") for r in range(4)]
    assert dict(os.environ) == before


@pytest.mark.parametrize("size", [1, 3, 5])
def test_collectives_have_the_values_of_their_definition(size: int) -> None:
    def job() -> None:
        rank, _ = _start()
        rows = torch.arange(size * 4.0).view(size, 4) + 1
        for op, wanted in (
            (dist.ReduceOp.SUM, rows.sum(0)),
            (dist.ReduceOp.MAX, rows.amax(0)),
            (dist.ReduceOp.MIN, rows.amin(0)),
            (dist.ReduceOp.PRODUCT, rows.prod(0)),
            (dist.ReduceOp.AVG, rows.mean(0)),
        ):
            mine = rows[rank].clone()
            dist.all_reduce(mine, op=op)
            assert torch.allclose(mine, wanted)
        whole = torch.empty(size * 4)
        dist.all_gather_into_tensor(whole, rows[rank])
        assert torch.equal(whole, rows.view(-1))
        parts = [torch.empty(4) for _ in range(size)]
        work = dist.all_gather(parts, rows[rank], async_op=True)
        work.wait()
        assert torch.equal(torch.stack(parts), rows)
        part = torch.empty(4)
        dist.reduce_scatter_tensor(part, rows.view(-1) * (rank + 1))
        assert torch.equal(part, rows[rank] * sum(range(1, size + 1)))
        first = rows[rank].clone()
        dist.broadcast(first, src=size - 1)
        assert torch.equal(first, rows[-1])
        dist.scatter(part, list(rows) if rank == 0 else None, src=0)
        assert torch.equal(part, rows[rank])
        gathered = [torch.empty(4) for _ in range(size)] if rank == 0 else None
        dist.gather(rows[rank].clone(), gathered, dst=0)
        assert gathered is None or torch.equal(torch.stack(gathered), rows)
        total = rows[rank].clone()
        dist.reduce(total, dst=0)
        assert rank > 0 or torch.equal(total, rows.sum(0))
        sizes = [(rank + other) % 3 for other in range(size)]  # to each rank, and from it
        given = torch.cat([torch.full((n,), 10.0 * rank + other) for other, n in enumerate(sizes)])
        taken = torch.empty(sum(sizes))
        dist.all_to_all_single(taken, given, sizes, sizes)
        assert torch.equal(taken, torch.cat([torch.full((n,), 10.0 * other + rank) for other, n in enumerate(sizes)]))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": each} for each in range(size)]
        works = [dist.isend(rows[rank].clone(), (rank + 1) % size), dist.irecv(part, (rank - 1) % size)]
        for each in works if size > 1 else ():
            each.wait()
        assert size == 1 or torch.equal(part, rows[rank - 1])
        dist.barrier()

    rehearse.ranks(job, local=size)


def test_groups_of_some_ranks_do_not_mix() -> None:
    def job() -> float:
        rank, _ = _start()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3, 4])]
        mine = torch.tensor(float(rank))
        dist.all_reduce(mine, group=groups[0 if rank in (0, 2) else 1])
        return float(mine)

    assert rehearse.ranks(job, local=5) == [2, 8, 2, 8, 8]


def test_dtensors_are_redistributed() -> None:
    def job() -> None:
        rank, size = _start()
        mesh, whole = init_device_mesh("cpu", (size,)), torch.arange(35.0).view(7, 5)
        rows = DTensor.from_local(whole.chunk(size)[rank], mesh, [Shard(0)], run_check=False, shape=whole.shape,
                                  stride=whole.stride())  # fmt: skip
        assert torch.equal(rows.full_tensor(), whole)
        columns = rows.redistribute(mesh, [Shard(1)])
        assert torch.equal(columns.to_local(), whole.tensor_split([2, 4], dim=1)[rank])
        assert torch.equal((rows.sum(0)).redistribute(mesh, [Replicate()]).to_local(), whole.sum(0))

    rehearse.ranks(job, local=3)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _trained(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in inputs:
        model(each).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]


@pytest.mark.parametrize("engine", ["fsdp2", "laconic"])
def test_engines_train_as_one_process(engine: str) -> None:
    inputs = list(torch.randn(3, 6, 5))

    def job() -> list[Tensor]:
        if engine == "laconic":
            laconic.init_mesh("cpu")
        else:
            _start()
        model, shard = _model(), laconic.fully_shard if engine == "laconic" else fully_shard
        shard(model[0])
        shard(model)
        rank, size = dist.get_rank(), dist.get_world_size()
        return _trained(model, [each.view(size, -1, 5)[rank] for each in inputs])

    wanted = _trained(_model(), inputs)
    for found in rehearse.ranks(job, nodes=3):
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


def _coded_run(*, seed: int | None = None) -> list[bytes]:
    def job() -> bytes:
        laconic.init_mesh("cpu")
        model = _model()
        laconic.fully_shard(model[0], cache="host", wire="4bit")
        laconic.fully_shard(model, cache="host", wire="4bit")
        torch.manual_seed(dist.get_rank())
        return b"".join(each.numpy().tobytes() for each in _trained(model, list(torch.randn(3, 4, 5))))

    return rehearse.ranks(job, nodes=3, local=2, seed=seed)


def test_no_order_of_turns_changes_a_bit() -> None:
    wanted = _coded_run()
    assert all(_coded_run(seed=seed) == wanted for seed in range(4))


def test_time_passes_for_all_alike_and_costs_nothing() -> None:
    def job() -> float:
        rank, _ = _start()
        time.sleep(1000.0 * rank)
        dist.barrier()
        return round(time.monotonic())

    assert rehearse.ranks(job, local=3) == [2000] * 3


def test_threads_of_a_rank_take_turns_too() -> None:
    def job() -> list[float]:
        rank, size = _start()
        group, inbox, done = dist.new_group(range(size)), queue.SimpleQueue[Tensor](), threading.Event()

        def sum_up() -> float:
            mine = inbox.get()
            dist.all_reduce(mine, group=group)
            done.set()
            return float(mine)

        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(sum_up)
            dist.barrier()
            inbox.put(torch.tensor(1.0 + rank))
            assert done.wait(60)
            return [future.result()]

    assert rehearse.ranks(job, local=3) == [[6.0]] * 3


def test_a_deadlock_is_known_at_once_and_names_what_each_rank_waits_for() -> None:
    def job() -> None:
        rank, _ = _start()
        if rank < 2:
            dist.recv(torch.empty(3), 1 - rank)

    wanted = r"rank 0 waits for message 0 from rank 1 .*; rank 1 waits for message 0 from rank 0 .*; rank 2 ended"
    with pytest.raises(DeadlockError, match=wanted):
        rehearse.ranks(job, local=3)


def test_collectives_of_two_kinds_are_named() -> None:
    def job() -> None:
        rank, _ = _start()
        if rank == 1:
            dist.broadcast(torch.ones(1), src=0)
        else:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match=r"rank 1 calls broadcast 0 .*, where rank 0 calls all-reduce"):
        rehearse.ranks(job, local=3)


def test_a_time_out_runs_on_the_clock_of_turns() -> None:
    def job() -> float:
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 90000ms"):
                dist.recv(torch.empty(1), 1)
        else:
            time.sleep(500)
        return time.monotonic()

    first, second = rehearse.ranks(job, local=2)
    assert 90 <= first < 91 < second


@pytest.mark.parametrize("turn", range(8))
def test_the_others_hear_of_a_rank_that_dies_at_any_turn(turn: int) -> None:
    def job() -> int:
        _start()
        for step in range(4):
            try:
                dist.all_reduce(torch.ones(2))
            except RuntimeError:
                return step
        return 4

    steps = rehearse.ranks(job, local=3, faults=[Kill(rank=1, turn=turn)])
    assert steps[1] in (None, 4)
    assert abs(steps[0] - steps[2]) <= 1
    assert (steps[0] < 4) == (turn < 3)


def test_a_message_may_be_damaged_before_it_is_read() -> None:
    def flip(letter: Letter) -> None:
        if (letter.source, letter.target, letter.number) == (0, 1, 1):
            letter.tensors[0].view(torch.uint8)[0] ^= 1

    def job() -> list[int]:
        rank, _ = _start()
        landings = torch.zeros(3, 4, dtype=torch.uint8)
        for landing in landings:
            if rank == 0:
                dist.send(landing + 4, 1)
            else:
                dist.recv(landing, 0)
        return landings[:, 0].tolist()

    assert rehearse.ranks(job, local=2, on_message=flip)[1] == [4, 5, 4]


def test_a_rank_has_its_own_random_numbers_streams_and_variables() -> None:
    def job() -> tuple[Any, ...]:
        rank, _ = _start()
        torch.manual_seed(rank)
        random.seed(rank)
        os.environ["LACONIC_OF_A_RANK"] = str(rank)
        sys.stdout = StringIO()
        found = []
        for _ in range(2):
            dist.barrier()
            print(rank, end="")
            found.append((float(torch.rand(1)), random.random(), os.environ["LACONIC_OF_A_RANK"]))
        return *found, sys.stdout.getvalue()

    before = torch.get_rng_state(), random.getstate(), sys.stdout, dict(os.environ)
    for rank, found in enumerate(rehearse.ranks(job, local=3)):
        torch_own, own = torch.Generator().manual_seed(rank), random.Random(rank)
        wanted = [(float(torch.rand(1, generator=torch_own)), own.random(), str(rank)) for _ in range(2)]
        assert found == (*wanted, str(rank) * 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), sys.stdout, dict(os.environ)) == before[1:]


def test_the_first_failure_ends_all_and_is_shown() -> None:
    def job() -> None:
        rank, _ = _start()
        if rank == 2:
            raise LookupError("no such row")
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 2 failed:.*LookupError: no such row") as caught:
        rehearse.ranks(job, local=3)
    assert isinstance(caught.value.__cause__, LookupError)
    assert not dist.is_initialized()


def test_whoever_goes_on_has_lost_its_connections() -> None:
    def job() -> str:
        rank, _ = _start()
        if rank == 1:
            raise LookupError("no such row")
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 is gone"):
            dist.barrier()
        return "went on"

    first, failed, last = rehearse.ranks(job, local=3, goes_on=True)
    assert (first, str(failed), last) == ("went on", "no such row", "went on")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RankError, match="no backend 'nccl': their tensors are on the CPU"):
        rehearse.ranks(lambda: dist.init_process_group("nccl"), local=2)

    def nested() -> None:
        _start()
        rehearse.ranks(_start, local=2)

    with pytest.raises(RankError, match="a rank already"):
        rehearse.ranks(nested, local=2)
