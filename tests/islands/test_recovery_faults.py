"""Restarts after damage to the recovery files, and after kills at every point of a write."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.islands.local_steps import LocalSteps
from laconic.store import folder as store
from laconic.store import tensors
from laconic.store.folder import CrashPoint, FileRecord
from tests.faults.recovery_damage import try_cases
from tests.islands.test_local_steps import adamw, flat, take
from tests.support.launch import run_ranks
from tests.support.sharded_net import Net, build, shard

EVERY, STEPS, CASES = 2, 6, 8


def test_damaged_files_neither_block_a_restart_nor_load(tmp_path: Path) -> None:
    """A sample of `python -m tests.faults --rows recovery-damage`."""
    counts, harmed = try_cases(tmp_path / "campaign", CASES)
    assert harmed == []
    assert counts["restored less"] > CASES / 4


def start(machine: Path | None, islands: int, local: int, seed: int) -> tuple[nn.Module, LocalSteps, list[str]]:
    """A model, its steps with the files of a machine or without, and the warnings."""
    mesh = laconic.init_mesh("cpu", islands=islands, nodes=dist.get_world_size() // islands // local, local=local)
    model = shard(build(lambda: Net(1, 5, 7), seed=seed), [], mesh=mesh)
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        steps = LocalSteps(
            model, adamw(model), mesh=mesh, every=EVERY, error_feedback=0.5, recovery=machine, run_id="killed"
        )
    return model, steps, [str(line.message) for line in lines]


class Killed(BaseException):
    """In place of SIGKILL: the thread that writes ends here, and the rank writes nothing more."""


POINTS = (CrashPoint.BEGUN, CrashPoint.PRUNED, CrashPoint.WRITTEN, CrashPoint.SYNCED, CrashPoint.LISTED,
          CrashPoint.COMMITTED)  # fmt: skip
"""Those that a writer of states passes."""


def job_killed(folder: Path, islands: int, local: int, victims: list[int]) -> list[tuple[int, Any, int, bool]]:
    """Stop the victims' writers at each point, then restart all. Return (sync, point, steps lost, is equal)."""
    name = f"machine-{dist.get_rank() // local}"
    model, steps, _ = start(None, islands, local, 0)  # to keep states changes nothing
    take(model, steps, range(STEPS), local)
    want = flat(model)
    steps.finish()
    found = []
    for sync, point in ((2, CrashPoint.SYNCED), *((4, point) for point in POINTS)):
        machine, begun = folder / f"{sync}-{point}" / name, [0]

        def kill(reached: CrashPoint, sync: int = sync, point: CrashPoint = point, begun: list[int] = begun) -> None:
            begun[0] += reached == CrashPoint.BEGUN
            if begun[0] == sync // EVERY and reached == point and dist.get_rank() in victims:
                raise Killed

        store.on_crash_point = kill
        model, steps, _ = start(machine, islands, local, 0)
        take(model, steps, range(sync + 1), local)
        with contextlib.suppress(Killed):
            steps.finish()
        store.on_crash_point = None
        dist.barrier()
        model, steps, _ = start(machine, islands, local, 1)  # built with another seed
        lost = sync - steps.steps
        take(model, steps, range(steps.steps, STEPS), local)
        found.append((sync, point, lost, torch.equal(flat(model), want)))
        steps.finish()
    return found


@pytest.mark.parametrize(
    ("islands", "local", "victims"), [pytest.param(1, 2, [1], marks=pytest.mark.heavy), (2, 1, [0, 1])]
)
def test_a_kill_at_any_point_of_a_write_leaves_one_sync_to_all(
    islands: int, local: int, victims: list[int], tmp_path: Path
) -> None:
    """One rank of an island, or every island, is killed. All go on from one sync, and end with the unbroken bits."""
    by_rank = run_ranks(job_killed, islands * local, tmp_path, islands, local, victims, local=local)
    assert all(found == by_rank[0] for found in by_rank)
    for sync, point, lost, is_equal in by_rank[0]:
        assert lost == (0 if point == CrashPoint.COMMITTED else EVERY), (point, sync)
        assert is_equal == (lost == 0 or sync > EVERY), "before the first sync there is nothing to keep"


_write, _is_full = tensors.write, [False]


def job_full(machine: Path) -> tuple[list[str], list[int], list[str]]:
    """The disk of rank 1 is full at the syncs 4 and 6: training goes on, and the state before stays."""

    def write(path: Path, values: Any) -> FileRecord:
        if _is_full[0] and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return _write(path, values)

    tensors.write = write
    kept = []
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        model, steps, _ = start(machine, 1, 2, 0)
        for sync in (2, 4, 6, 8):
            if dist.get_rank() == 1:
                _is_full[0] = sync in (4, 6)
            take(model, steps, range(steps.steps, sync), 2)
            steps.finish()
            dist.barrier()
            kept.append(start(machine, 1, 2, 1)[1].steps)
            dist.barrier()
    said = [str(line.message) for line in lines if "could not be written" in str(line.message)]
    return said, kept, sorted(path.name for path in machine.rglob("start-*"))


def test_a_full_disk_costs_a_sync_and_not_the_run(tmp_path: Path) -> None:
    for rank, (said, kept, files) in enumerate(run_ranks(job_full, 2, tmp_path, local=2)):
        assert kept == [2, 2, 2, 8]
        assert len(said) == (rank == 1)
        assert all("after step 4 could not be written ([Errno 28] No space left" in line for line in said)
        assert sum("step-2-" in name for name in files) in (0, 2)


def job_moved(folder: Path, orders: list[list[int]]) -> list[tuple[int, bool, list[Tensor], list[str]]]:
    """Two islands of two nodes restart with each rank's files on machine `order[rank]`."""
    rank, found = dist.get_rank(), []
    model, steps, _ = start(folder / f"machine-{rank}", 2, 1, 0)
    take(model, steps, range(4))
    steps.finish()
    dist.barrier()
    with torch.no_grad():
        want = steps.fragments[0].flat.clone()
    for order in orders:
        model, steps, lines = start(folder / f"machine-{order[rank]}", 2, 1, 1)
        moments = [steps.optimizer.state[p]["exp_avg"].to_local().clone() for p in model.parameters()]
        found.append((steps.steps, torch.equal(steps.fragments[0].flat, want), moments, lines))
    return found


def test_nodes_with_other_numbers_find_their_states(tmp_path: Path) -> None:
    """Nodes exchange their places inside an island, and islands theirs; every shard and its moments are found."""
    orders = [[0, 1, 2, 3], [1, 0, 2, 3], [2, 3, 0, 1], [3, 0, 1, 2]]
    by_rank = run_ranks(job_moved, 4, tmp_path, orders, local=1)
    kept = [torch.cat(by_rank[rank][0][2]) for rank in range(4)]
    for number, order in enumerate(orders):
        restored = [found[number] for found in by_rank]
        assert [(step, is_equal, lines) for step, is_equal, _, lines in restored] == [(4, True, [])] * 4, order
        got = [torch.cat(moments) for _, _, moments, _ in restored]
        origins = [[all(map(torch.equal, got[i : i + 2], kept[j : j + 2])) for j in (0, 2)] for i in (0, 2)]
        assert sorted(origins) == [[False, True], [True, False]], "each island has all moments of one earlier island"
