"""All ranks of a job in one process: values, errors, faults, and what each rank has for itself."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import os
import queue
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import laconic
from laconic import _compat
from laconic.rehearse import DeadlockError, Kill, RankError, in_process, ranks, turns
from laconic.rehearse.in_process import Letter
from tests.support import sharded_net
from tests.support.flips import flip_bit

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def begin(**options: Any) -> tuple[int, int]:
    """The rank and the number of ranks."""
    dist.init_process_group("gloo", **options)
    return dist.get_rank(), dist.get_world_size()


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_results_come_by_rank_from_torchruns_environment() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")

    def job() -> Any:
        mesh = laconic.init_mesh("cpu")
        return tuple(int(os.environ[name]) for name in names), mesh.shape, list(mesh.get_coordinate())

    for rank, (numbers, shape, coordinate) in enumerate(ranks(job, nodes=3, local=2)):
        assert numbers == (rank, 6, rank % 2, 2, rank // 2, 3)
        assert (shape, coordinate) == ((1, 3, 2), [0, rank // 2, rank % 2])


@pytest.mark.parametrize("size", [1, 3])
def test_reductions_and_copies(size: int) -> None:
    def job() -> None:
        rank, _ = begin()
        terms = [torch.tensor([float(each + 1), -each]) for each in range(size)]
        expected = {
            dist.ReduceOp.SUM: sum(terms), dist.ReduceOp.AVG: sum(terms) / size,
            dist.ReduceOp.MAX: torch.tensor([float(size), 0]), dist.ReduceOp.MIN: torch.tensor([1.0, 1 - size]),
            dist.ReduceOp.PRODUCT: torch.stack(terms).prod(0),
        }  # fmt: skip
        for op, value in expected.items():
            work = dist.all_reduce(out := terms[rank].clone(), op=op, async_op=True)
            work.wait()
            assert torch.equal(out, value), op
            dist.reduce(out := terms[rank].clone(), size - 1, op=op)
            assert torch.equal(out, value if rank == size - 1 else terms[rank]), op
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) + rank)
        assert part.tolist() == [size * (2 * rank + i) + size * (size - 1) / 2 for i in range(2)]

        own, last, second = torch.tensor([rank, 10 * rank]), size - 1, min(1, size - 1)
        rows = [[each, 10 * each] for each in range(size)]
        dist.broadcast(out := own.clone(), last)
        assert out.tolist() == rows[last]
        outs = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(outs, own)
        assert torch.stack(outs).tolist() == rows
        dist.all_gather_into_tensor(flat := torch.empty(size, 2, dtype=torch.int64), own)
        assert flat.tolist() == rows
        outs = [torch.zeros_like(own) for _ in range(size)]
        dist.gather(own, outs if rank == last else None, dst=last)
        assert torch.stack(outs).tolist() == (rows if rank == last else [[0, 0]] * size)
        dist.scatter(out, [torch.tensor(row) for row in rows] if rank == second else None, src=second)
        assert out.tolist() == rows[rank]

        # Rank i has i + j elements for rank j, all 100 i + j.
        given, taken = [rank + each for each in range(size)], [each + rank for each in range(size)]
        values = torch.tensor([100 * rank + each for each in range(size)]).repeat_interleave(torch.tensor(given))
        dist.all_to_all_single(out := torch.empty(sum(taken), dtype=torch.int64), values, taken, given)
        assert out.tolist() == [100 * each + rank for each in range(size) for _ in range(each + rank)]

        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "rest": "x" * rank})
        assert objects == [{"rank": each, "rest": "x" * each} for each in range(size)]
        dist.broadcast_object_list(one := [("rank", rank)], src=last)
        assert one == [("rank", last)]

    ranks(job, nodes=size)


def test_messages_come_in_order_and_by_tag_and_subgroups_sum_by_themselves() -> None:
    def job() -> tuple[list[int], int]:
        rank, size = begin()
        after, before, taken = (rank + 1) % size, (rank - 1) % size, []
        works = [dist.isend(torch.tensor([10 * rank + each]), after, tag=each % 2) for each in range(4)]
        for tag in (1, 1, 0):
            dist.recv(out := torch.empty(1, dtype=torch.int64), before, tag=tag)
            taken.append(out.item())
        work = dist.irecv(out, before)
        work.wait()
        assert all(each.wait() for each in works)
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        dist.all_reduce(total := torch.tensor([rank]), group=groups[rank % 2])
        return [*taken, out.item()], int(total)

    expected = [[10 * before + i for i in (1, 3, 0, 2)] for before in (3, 0, 1, 2)]
    assert ranks(job, nodes=4) == list(zip(expected, [2, 4, 2, 4], strict=True))


def test_dtensors_and_functional_collectives() -> None:
    def job() -> None:
        rank, size = begin()
        mesh, whole = init_device_mesh("cpu", (size,)), torch.arange(28.0).view(7, 4)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        for target in (Replicate(), Shard(1), Shard(0)):
            assert torch.equal(rows.redistribute(mesh, [target]).full_tensor(), whole)
        products = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.T, mesh, [Shard(0)])
        assert products.placements == (Partial(),)
        assert torch.equal(products.full_tensor(), whole @ whole.T)
        one = torch.tensor([float(rank)])
        assert functional.all_reduce(one, "sum", mesh).tolist() == [3]
        assert functional.all_gather_tensor(one, 0, mesh).tolist() == [0, 1, 2]
        assert functional.reduce_scatter_tensor(torch.arange(3.0), "avg", 0, mesh).tolist() == [rank]

    ranks(job, nodes=3)


@pytest.mark.parametrize("seed", [None, 3])
def test_fsdp2_trains_to_the_weights_of_one_process_in_any_order(seed: int | None) -> None:
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))

    def steps(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}

    def job() -> dict[str, Tensor]:
        rank, size = begin()
        model = sharded_net.build()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
        return steps(model, batch.chunk(size)[rank])

    oracle = steps(sharded_net.build(), batch)
    for weights in ranks(job, nodes=2, local=2, seed=seed):
        torch.testing.assert_close(weights, oracle)


# -- threads and clocks ------------------------------------------------------------------------------------------------


def test_threads_of_a_rank_take_turns() -> None:
    def job() -> list[int]:
        rank, _ = begin()
        groups = [dist.new_group() for _ in range(2)]
        ready, inbox, answers = threading.Event(), queue.SimpleQueue[int](), queue.Queue[int]()

        def summed(place: int) -> int:
            time.sleep(place)
            dist.all_reduce(out := torch.tensor([rank + place]), group=groups[place])
            return int(out)

        def answer() -> None:
            mine = inbox.get()
            ready.wait()
            answers.put(mine)

        helper = threading.Thread(target=answer)
        helper.start()
        with ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(summed, range(2)))
        assert answers.empty()
        inbox.put(rank)
        ready.set()
        helper.join()
        return [*sums, answers.get()]

    assert ranks(job, nodes=3) == [[3, 6, rank] for rank in range(3)]


def test_an_hour_takes_no_time() -> None:
    def job() -> float:
        begun = time.monotonic()
        time.sleep(3600)
        return time.monotonic() - begun

    assert all(3600 <= each < 3601 for each in ranks(job, nodes=2, timeout_s=30))


def test_a_group_times_out_on_the_ranks_clock() -> None:
    def job() -> float:
        rank, _ = begin(timeout=timedelta(seconds=5))
        if rank == 1:
            time.sleep(100)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match=("Timed out waiting 5000ms", "Connection closed by peer")[rank]):
            dist.recv(torch.empty(1), 1 - rank)
        return time.monotonic() - begun

    first, second = ranks(job, nodes=2)
    assert 5 <= first < 6
    assert second < 1


def test_a_rank_that_never_waits_is_given_up() -> None:
    may_end = False

    def job() -> None:
        while not may_end:
            pass
        os.environ["LACONIC_LATE"] = "yes"
        time.sleep(1)

    before = dict(os.environ)
    with pytest.raises(TimeoutError, match=r"rank 0\n[\s\S]*may_end"):
        ranks(job, nodes=2, timeout_s=0.2)
    late = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    may_end = True
    for thread in late:
        thread.join()
    assert os.environ.pop("LACONIC_LATE") == "yes"
    assert dict(os.environ) == before


def test_a_run_that_others_keep_from_the_processors_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def process_time() -> float:
        looks.append(None)
        return 0.003 * len(looks)

    def job() -> int:
        while len(looks) < 3:
            pass
        return 1

    monkeypatch.setattr(turns.time, "process_time", process_time)
    assert ranks(job, timeout_s=0.01) == [1]


# -- errors ------------------------------------------------------------------------------------------------------------


def wait_in_a_circle(rank: int) -> None:
    if rank < 2:
        dist.recv(torch.empty(1), 1 - rank)


def call_another(rank: int) -> None:
    if rank == 1:
        dist.broadcast(torch.empty(1), 0)
    else:
        dist.all_reduce(torch.empty(1))


def give_another_size(rank: int) -> None:
    dist.all_reduce(torch.ones(3 if rank == 1 else 1))


def give_another_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32 if rank == 1 else torch.float32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (wait_in_a_circle,
         "no rank can go on: rank 0 waits for message 0 from rank 1 of group 0; rank 1 waits for message 0 from rank 0 "
         "of group 0; rank 2 ended before"),
        (call_another, r"rank 1 calls broadcast 0 of group 0, where rank 0 calls all-reduce"),
        (give_another_size, r"all-reduce 0 .*rank 0 gives float32 \[1\]; rank 1 gives float32 \[3\]"),
        (give_another_dtype, r"all-reduce 0 .*rank 0 gives float32 \[1\]; rank 1 gives int32 \[1\]"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_named_with_their_transfers(body: Callable[[int], None], message: str) -> None:
    with pytest.raises(DeadlockError if body is wait_in_a_circle else RankError, match=message):
        ranks(lambda: body(begin()[0]), nodes=3)


def test_a_failure_has_its_rank_and_traceback() -> None:
    def job() -> None:
        rank, _ = begin()
        if rank == 2:
            raise KeyError("the error of a rank")
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 2 failed:\n[\s\S]*in job\n[\s\S]*the error of a rank") as caught:
        ranks(job, nodes=3)
    assert isinstance(caught.value.__cause__, KeyError)
    *others, last = ranks(job, nodes=3, goes_on=True)
    assert isinstance(last, KeyError)
    assert all("Connection closed by peer" in str(each) for each in others)


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: dist.init_process_group("nccl"), "ranks in one process have no backend 'nccl'"),
        (lambda: ranks(os.getpid), "this process is a rank already"),
    ],
)
def test_nccl_and_ranks_in_a_rank_are_refused(body: Callable[[], Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks(body, nodes=2)


@pytest.mark.parametrize("cluster", [{"nodes": 0}, {"jobs": 0}, {"local": 2, "faults": [Kill(rank=2, turn=0)]}])
def test_a_cluster_or_a_fault_that_cannot_be_is_refused(cluster: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least one job has one node|never happens: ranks are 0 to 1"):
        ranks(lambda: None, **cluster)


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_jobs_have_groups_of_their_own_and_meet_in_a_store() -> None:
    def job() -> Any:
        own, number = begin(), int(os.environ["LACONIC_JOB"])
        total = torch.tensor(float(number))
        dist.all_reduce(total)
        store = dist.TCPStore("meeting", 1, is_master=False)
        links = dist.PrefixStore(f"place {own[0]}", store)
        link = _compat.gloo_group(links, number, 3, 5.0)  # of one rank of each job
        _compat.all_gather(found := [torch.zeros(2) for _ in range(3)], torch.tensor([number, *own[:1]]).float(), link)
        assert not dist.TCPStore("elsewhere", 1).check(["place 0"])
        return own, float(total), [each.tolist() for each in found]

    for rank, (own, total, found) in enumerate(ranks(job, jobs=3, nodes=2)):
        job_number, place = divmod(rank, 2)
        assert (own, total) == ((place, 2), 2.0 * job_number)
        assert found == [[number, place] for number in range(3)]


@pytest.mark.parametrize("dies_at", [0, 3])
def test_a_job_that_is_gone_is_lost_to_the_others(dies_at: int) -> None:
    def job() -> None:
        link = _compat.gloo_group(dist.TCPStore("meeting", 1), int(os.environ["LACONIC_JOB"]), 2, 5.0)
        while True:
            _compat.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1), link)

    lost, dead = ranks(job, jobs=2, faults=[Kill(rank=1, turn=dies_at)])
    assert dead is None
    message = "Connection closed by peer: rank 1 is gone" if dies_at else "wait timeout after 0:00:05"
    assert message in str(lost)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_kill_at_any_turn_leaves_the_others_with_an_error(seed: int | None) -> None:
    def job() -> float:
        rank, size = begin()
        total = torch.tensor([1.0])
        for _ in range(3):
            dist.all_reduce(total)
            dist.send(total, (rank + 1) % size)
            dist.recv(total, (rank - 1) % size)
        return total.item()

    for turn in itertools.count():
        results = ranks(job, nodes=3, seed=seed, faults=[Kill(rank=1, turn=turn)])
        if results[1] is not None:
            break
        lost = [each for each in results if isinstance(each, RuntimeError)]
        assert lost or turn > 2  # after the last step, nobody needs rank 1
        assert all("Connection closed by peer" in str(each) for each in lost)
        assert all(each in (27, *lost) for each in (results[0], results[2]))
    assert turn > 3
    assert results == [27, 27, 27]


def test_a_changed_message_arrives_changed() -> None:
    seen = []

    def flip(letter: Letter) -> None:
        seen.append((letter.source, letter.target, letter.number))
        if letter.source == 1 and letter.number == 1:
            flip_bit(letter.tensors[0], bit=31, seed=0)

    def job() -> list[float]:
        rank, _ = begin()
        taken = []
        for value in (1.0, 2.0):
            if rank == 1:
                dist.send(torch.tensor([value]), 0)
            else:
                dist.recv(out := torch.empty(1), 1)
                taken.append(out.item())
        return taken

    assert ranks(job, nodes=2, on_message=flip)[0] == [1, -2]
    assert [each for each in seen if each[1] is not None] == [(1, 0, 0), (1, 0, 1)]


# -- what belongs to a process -----------------------------------------------------------------------------------------


def outside() -> Any:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return copy.deepcopy((dict(os.environ), states, list(warnings.filters), list(sys.argv))), sys.stdout


def draws() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def seed_with(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_what_a_rank_imports_first_belongs_to_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("seen = []")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(in_process, "_PER_PROCESS", [*in_process._PER_PROCESS, ("imported_late", "seen")])

    def job() -> list[int]:
        rank, _ = begin()
        late = importlib.import_module("imported_late")
        dist.barrier()
        late.seen.append(rank)
        dist.barrier()
        return list(late.seen)

    assert ranks(job, nodes=3) == [[0], [1], [2]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_has_its_own_state(fails: bool) -> None:
    def job() -> list[float]:
        rank, _ = begin()
        seed_with(rank)
        sys.stdout, os.environ["LACONIC_OWN"], sys.argv = io.StringIO(), str(rank), ["job", str(rank)]
        warnings.simplefilter("error" if rank else "ignore")
        print("rank", rank)
        dist.barrier()
        drawn = draws()
        dist.barrier()
        seen = os.environ["LACONIC_OWN"], sys.argv[1], sys.stdout.getvalue(), warnings.filters[0][0]
        assert seen == (str(rank), str(rank), f"rank {rank}\n", "error" if rank else "ignore")
        if fails and rank == 1:
            raise ValueError("a rank fails")
        dist.barrier()
        return drawn

    before, drawn = outside(), []
    with pytest.raises(RankError, match="a rank fails") if fails else contextlib.nullcontext():
        drawn = ranks(job, nodes=3)
    assert outside() == before
    assert not dist.is_initialized()
    for rank, own in enumerate(drawn):
        seed_with(rank)
        assert own == draws()
