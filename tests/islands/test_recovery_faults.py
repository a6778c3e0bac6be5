"""Restarts after damage to the recovery files, and after kills at every point of a write."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.islands.local_steps import LocalSteps
from laconic.store import folder as store
from laconic.store import tensors
from laconic.store.folder import CrashPoint, FileRecord
from tests.faults.recovery_damage import QUICK_CASES, try_cases
from tests.islands.test_local_steps import adamw, batch, values
from tests.support.launch import run_ranks
from tests.support.sharded_net import Net, build, shard, squared_error

EVERY, STEPS = 2, 8


def make() -> Net:
    return Net(1, 5, 7)


def test_damaged_files_neither_block_a_restart_nor_load(tmp_path: Path) -> None:
    """A sample of `python -m tests.faults --rows recovery-damage`."""
    counts, harmed = try_cases(tmp_path / "campaign", QUICK_CASES)
    assert harmed == []
    assert counts["restored less"] > QUICK_CASES / 4


def start(folder: Path, islands: int, local: int, seed: int) -> tuple[torch.nn.Module, LocalSteps]:
    mesh = laconic.init_mesh("cpu", islands=islands, nodes=1, local=local)
    model = shard(build(make, seed=seed), mesh=mesh)
    machine = folder / f"machine-{dist.get_rank() // local}"
    steps = LocalSteps(
        model, adamw(model), mesh=mesh, every=EVERY, error_feedback=0.5, recovery=machine, run_id="killed"
    )
    return model, steps


def go_on(model: torch.nn.Module, steps: LocalSteps, upto: int) -> dict[str, Any]:
    while steps.steps < upto:
        squared_error(model, batch(steps.steps, dist.get_rank())).backward()
        steps.step()
        steps.zero_grad()
    return values(model)


class Killed(BaseException):
    """In place of SIGKILL: the thread that writes ends here, and the rank writes nothing more."""


POINTS = (CrashPoint.BEGUN, CrashPoint.PRUNED, CrashPoint.WRITTEN, CrashPoint.SYNCED, CrashPoint.LISTED,
          CrashPoint.COMMITTED)  # fmt: skip
"""Those that a writer of states passes."""


def job_killed(folder: Path, islands: int, local: int, victims: list[int]) -> list[tuple[str, int, bool]]:
    """Stop the victims' writers at each point of each write, then restart all. Return (point, steps lost, is equal)."""
    model, steps = start(folder / "unbroken", islands, local, 0)
    want = go_on(model, steps, STEPS)
    steps.finish()
    found = []
    for sync, point in ((2, CrashPoint.SYNCED), *((6, point) for point in POINTS)):
        here, begun = folder / f"{sync}-{point}", [0]

        def kill(reached: CrashPoint, sync: int = sync, point: CrashPoint = point, begun: list[int] = begun) -> None:
            begun[0] += reached == CrashPoint.BEGUN
            if begun[0] == sync // EVERY and reached == point and dist.get_rank() in victims:
                raise Killed

        store.on_crash_point = kill
        model, steps = start(here, islands, local, 0)
        go_on(model, steps, sync + 1)
        with contextlib.suppress(Killed):
            steps.finish()
        store.on_crash_point = None
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, steps = start(here, islands, local, 1)  # built with another seed
        lost = sync - steps.steps
        got = go_on(model, steps, STEPS)
        steps.finish()
        assert lost == (0 if point == CrashPoint.COMMITTED else EVERY), (point, sync)
        found.append((f"{point} of {sync}", lost, all(torch.equal(got[name], want[name]) for name in want)))
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
    assert any(lost for _, lost, _ in by_rank[0])
    for name, lost, is_equal in by_rank[0]:
        assert is_equal == (lost == 0 or not name.endswith("of 2")), "before the first sync there is nothing to keep"


_write, _is_full = tensors.write, [False]


def job_full(folder: Path) -> tuple[list[str], list[int], list[str]]:
    """The disk of rank 1 is full at the syncs 4 and 6: training goes on, and the state before stays."""

    def write(path: Path, values: Any) -> FileRecord:
        if _is_full[0] and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return _write(path, values)

    tensors.write = write
    kept = []
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        model, steps = start(folder, 1, 2, 0)
        for sync in (2, 4, 6, 8):
            if dist.get_rank() == 1:
                _is_full[0] = sync in (4, 6)
            go_on(model, steps, sync)
            steps.finish()
            dist.barrier()
            begun = start(folder, 1, 2, 1)[1].steps
            kept.append(begun)
            dist.barrier()
    said = [str(line.message) for line in lines if "could not be written" in str(line.message)]
    return said, kept, sorted(path.name for path in folder.rglob("start-*"))


def test_a_full_disk_costs_a_sync_and_not_the_run(tmp_path: Path) -> None:
    for rank, (said, kept, files) in enumerate(run_ranks(job_full, 2, tmp_path, local=2)):
        assert kept == [2, 2, 2, 8]
        assert len(said) == (rank == 1)
        assert all("after step 4 could not be written ([Errno 28] No space left" in line for line in said)
        assert sum("step-2-" in name for name in files) in (0, 2)


def job_moved(folder: Path, machines: list[list[int]]) -> list[tuple[int, bool, list[torch.Tensor], list[str]]]:
    """Two islands of two ranks restart with each rank's files on machine `order[rank]`."""
    names = [f"machine-{machine}" for machine in range(4)]

    def begin(order: list[int], seed: int) -> tuple[torch.nn.Module, LocalSteps]:
        mesh = laconic.init_mesh("cpu", islands=2, nodes=2, local=1)
        model = shard(build(make, seed=seed), mesh=mesh)
        machine = folder / names[order[dist.get_rank()]]
        return model, LocalSteps(model, adamw(model), mesh=mesh, every=EVERY, recovery=machine, run_id="moved")

    model, steps = begin([0, 1, 2, 3], 0)
    go_on(model, steps, 4)
    steps.finish()
    dist.barrier()
    with torch.no_grad():
        want = steps.fragments[0].flat.clone()
    found = []
    for order in machines:
        with warnings.catch_warnings(record=True) as lines:
            warnings.simplefilter("always")
            model, steps = begin(order, 1)
        moments = [local_part(steps.optimizer.state[p]["exp_avg"]) for p in model.parameters()]
        found.append(
            (steps.steps, torch.equal(steps.fragments[0].flat, want), moments, [str(w.message) for w in lines])
        )
    return found


def local_part(value: torch.Tensor) -> torch.Tensor:
    return value.to_local().clone() if isinstance(value, laconic.RaggedTensor) else value.clone()


def test_nodes_with_other_numbers_find_their_states(tmp_path: Path) -> None:
    """Nodes exchange their places inside an island, and islands theirs; every shard and its moments are found."""
    orders = [[0, 1, 2, 3], [1, 0, 2, 3], [2, 3, 0, 1], [3, 0, 1, 2]]
    by_rank = run_ranks(job_moved, 4, tmp_path, orders, local=1)
    kept = [by_rank[rank][0][2] for rank in range(4)]
    for number, order in enumerate(orders):
        restored = [found[number] for found in by_rank]
        assert [(step, is_equal, lines) for step, is_equal, _, lines in restored] == [(4, True, [])] * 4, order
        islands = [[moments for _, _, moments, _ in restored[i : i + 2]] for i in (0, 2)]
        origins = [[same(island, kept[i : i + 2]) for i in (0, 2)] for island in islands]
        assert sorted(origins) == [[False, True], [True, False]], "each island has all moments of one earlier island"


def same(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for ours, theirs in zip(got, want, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
