"""Which sync islands go on from after a restart, what damage and kills leave of it, and how islands come and go so."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.islands.local_steps import LocalSteps
from laconic.islands.saved_state import Place, SavedState, Sync, make_plan
from laconic.islands.state_folder import StateFolder
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.faults.recovery_damage import try_cases
from tests.islands.test_local_steps import Case, adamw, flat, take
from tests.support.launch import on_ranks, run_ranks
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


def job_full(machine: Path) -> tuple[list[str], list[int], list[str]]:
    """The disk of rank 1 is full at the syncs 4 and 6: training goes on, and the state before stays."""
    sync = 0

    def fill(reached: CrashPoint) -> None:
        if reached == CrashPoint.WRITTEN and sync in (4, 6) and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    store.on_crash_point = fill
    kept = []
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        model, steps, _ = start(machine, 1, 2, 0)
        for sync in (2, 4, 6, 8):
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


# -- islands that come and go with a restart ---------------------------------------------------------------------------


def job(case: Case, machines: list[str]) -> tuple[int, dict[str, Tensor]]:
    """Train an island on each machine to step 4; return the step after which it began, and the state at the end."""
    model, steps = case.start(recovery=machines[dist.get_rank()], run_id="test")
    begun = steps.steps
    take(model, steps, range(begun, 4))
    steps.finish()
    outer = {key: value.clone() for key, value in steps.state_dict().items() if isinstance(value, Tensor)}
    return begun, {"inner": flat(model), **outer}


def machines_of(folder: Path) -> list[str]:
    return [str(folder / f"machine-{i}") for i in range(3)]


@on_ranks(1, local=1)
def test_a_run_that_was_rewound_is_restored_as_it_went_on(tmp_path: Path) -> None:
    """It syncs both fragments, loads the state of the beginning, and syncs one there, trained on other rows."""
    case, kept = Case(islands=1, both={"every": 4, "fragments": 2}), {"recovery": tmp_path, "run_id": "test"}
    model, steps = case.start(**kept)
    beginning = copy.deepcopy(steps.state_dict())
    take(model, steps, range(4))
    steps.load_state_dict(beginning)
    take(model, steps, range(10, 12))
    steps.finish()
    _, restored = replace(case, seed=1).start(**kept)
    assert restored.steps == 2
    assert restored._exchange.is_inside
    for before, after in zip(steps.fragments, restored.fragments, strict=True):
        assert all(map(torch.equal, before.vectors(), after.vectors()))


def test_islands_come_and_go(tmp_path: Path) -> None:
    def run(seed: int, machines: list[str]) -> list[tuple[int, dict[str, Tensor]]]:
        case = Case(islands=len(machines), both={"every": 2}, seed=seed)
        return run_ranks(job, len(machines), case, machines, local=1)

    machines = machines_of(tmp_path)
    (begun, before), _ = run(0, machines[:2])
    assert begun == 0
    joined = run(1, [machines[2], *machines[:2]])  # the new machine comes first
    alone = run(2, machines[1:2])
    for index, damaged in enumerate(sorted((tmp_path / "machine-1").glob("*/*/*"))):
        damaged.write_bytes(damaged.read_bytes()[:100] if index % 2 else b"no file of torch")
    helped = run(3, machines[:2])  # island 1 gets the state of the other
    for begun, got in (*joined, *alone, *helped):
        assert begun == 4
        torch.testing.assert_close(got, before, atol=0, rtol=0)


def test_slices_keep_their_outer_state_when_the_number_of_their_holders_changes(tmp_path: Path) -> None:
    machines, sliced = machines_of(tmp_path), Case(both={"every": 2}, num_slices=2)
    three, two = replace(sliced, islands=3, held=[{1}, {0}, {0}]), replace(sliced, held=[{0}, {1}])
    _, before = run_ranks(job, 3, three, machines, local=1)[0]
    assert any("_slice0.momentum_buffer" in key for key in before)
    for begun, got in run_ranks(job, 2, two, machines, local=1):
        assert begun == 4
        torch.testing.assert_close(got, before, atol=0, rtol=0)


# -- which sync is restored, and who gets which state: [Note: A sync that counts] in islands/saved_state.py ------------


def state(steps: int, island: int, shard: int, of: int, *, slices: int = 0, **sync: Any) -> SavedState:
    key = Sync(**{"start": 1, "token": "a", **sync}, steps=steps)
    return SavedState(sync=key, island=island, shard=shard, num_shards=of, slices=(slices,))


def places(
    shape: tuple[int, int], held: Mapping[int, Iterable[SavedState]], slices: dict[int, int] | None = None
) -> list[Place]:
    """Ranks island by island; rank r offers held[r]."""
    islands, shards = shape
    trained = {island: (slices or {}).get(island, 0) for island in range(islands)}
    return [
        Place(island=r // shards, shard=r % shards, slices=(trained[r // shards],), offers=tuple(held.get(r, ())))
        for r in range(islands * shards)
    ]


def test_the_newest_sync_of_which_all_shards_are_there_is_restored() -> None:
    # Rank 0 has steps 4 and 6, rank 1 was killed before it wrote step 6: never 6 beside 4.
    held = {0: [state(4, 0, 0, 2), state(6, 0, 0, 2)], 1: [state(2, 0, 1, 2), state(4, 0, 1, 2)]}
    plan = make_plan(places((1, 2), held))
    assert plan is not None
    assert {fetch.state.sync.steps for fetch in plan.fetches} == {plan.sync.steps} == {4}
    assert plan.notes == ("the sync after step 6 is not used: no machine has its shards 1",)
    # A later start is newer than a higher step of an earlier start; one of two starts with one number is taken whole.
    plan = make_plan(places((1, 1), {0: [state(9, 0, 0, 1), state(5, 0, 0, 1, start=2)]}))
    assert plan is not None
    assert (plan.sync.start, plan.sync.steps) == (2, 5)
    assert make_plan(places((1, 2), {0: [state(4, 0, 0, 2)], 1: [state(4, 0, 1, 2, token="b")]})) is None


def test_islands_without_a_state_get_the_outer_one() -> None:
    one = [state(4, 0, 0, 2), state(4, 0, 1, 2)]
    plan = make_plan(places((2, 2), {2: one[:1], 3: one[1:]}))  # island 0 has joined
    assert plan is not None
    assert plan.lead == 1
    assert [(fetch.rank, fetch.holder) for fetch in plan.fetches] == [(2, 2), (3, 3)]
    [note] = plan.notes
    assert note == "island 0 has no state of its own from the sync after step 4: the inner optimizer starts afresh"
    # An island that trains another slice takes no inner state; somebody must still bring the outer one.
    plan = make_plan(places((1, 1), {0: [state(4, 0, 0, 1, slices=1)]}, slices={0: 0}))
    assert plan is not None
    assert [fetch.has_inner for fetch in plan.fetches] == [False]
    # Two half islands are left, and together they have every shard.
    plan = make_plan(places((1, 2), {0: [state(4, 1, 1, 2)], 1: [state(4, 0, 0, 2)]}))
    assert plan is not None
    got = [(fetch.rank, fetch.holder, fetch.state.shard, fetch.has_inner) for fetch in plan.fetches]
    assert got == [(0, 1, 0, False), (1, 0, 1, False)]


def test_every_plan_is_of_one_sync_and_complete() -> None:
    """Random machines: against a naive search, and every rank that gets a state gets its own shard of the sync."""
    rng = random.Random(0)
    for _ in range(500):
        islands, shards = rng.randint(1, 3), rng.randint(1, 3)
        all_states = [
            state(steps, island, shard, shards, start=start, slices=island % 2)
            for start, steps, island, shard in itertools.product((1, 2), (2, 4), range(3), range(shards))
        ]
        held = {rank: rng.sample(all_states, rng.randint(0, 5)) for rank in range(islands * shards)}
        job = places((islands, shards), held, slices={island: rng.randint(0, 1) for island in range(islands)})
        offered = {each for place in job for each in place.offers}
        whole = [
            sync for sync in {each.sync for each in offered}
            if {each.shard for each in offered if each.sync == sync} == set(range(shards))
        ]  # fmt: skip
        plan = make_plan(job)
        assert (plan.sync if plan else None) == max(whole, default=None)
        if plan is None:
            continue
        assert {job[f.rank].shard for f in plan.fetches if job[f.rank].island == plan.lead} == set(range(shards))
        for fetch in plan.fetches:
            assert fetch.state in job[fetch.holder].offers
            assert (fetch.state.sync, fetch.state.shard) == (plan.sync, job[fetch.rank].shard)
            assert not fetch.has_inner or fetch.state.slices == job[fetch.rank].slices
        with_inner = {(job[f.rank].island, f.state.island) for f in plan.fetches if f.has_inner}
        assert len(with_inner) == len({island for island, _ in with_inner}) == len({origin for _, origin in with_inner})


def test_a_part_that_somebody_has_removed_is_written_again(tmp_path: Path) -> None:
    folder = StateFolder(folder=tmp_path, run="run", layout="layout")
    folder.create()
    for step in (1, 2, 3):
        new = state(step, 0, 0, 1)
        parts = folder.missing(1, 2)
        assert parts == ([1] if step == 2 else [0, 1])
        folder.write(new, {index: {"step": step} for index in parts}, keep_from=0)
        if step == 2:
            (folder.path / new.name / "fragment-0.safetensors").unlink()
    *_, newest = folder.find(1)[0]
    assert folder.parse(folder.read(newest), newest) == [{"step": 3}, {"step": 3}]
