"""Which sync is restored, and who gets which state: [Note: A sync that counts] in islands/saved_state.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from laconic.islands.saved_state import Place, SavedState, Sync, make_plan
from laconic.islands.state_folder import StateFolder


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
    assert make_plan(places((1, 2), {0: [state(6, 0, 0, 2)], 1: [state(4, 0, 1, 2)]})) is None
    assert make_plan(places((2, 1), {})) is None
    # A later start is newer than a higher step of an earlier start; one of two starts with one number is taken whole.
    plan = make_plan(places((1, 1), {0: [state(9, 0, 0, 1), state(5, 0, 0, 1, start=2)]}))
    assert plan is not None
    assert (plan.sync.start, plan.sync.steps) == (2, 5)
    assert make_plan(places((1, 2), {0: [state(4, 0, 0, 2)], 1: [state(4, 0, 1, 2, token="b")]})) is None


def test_nodes_in_another_order_get_their_own_states_back() -> None:
    # Two islands of two nodes; the nodes come back as (3, 0), (2, 1) of the former (0, 1), (2, 3).
    node = [state(4, 0, 0, 2), state(4, 0, 1, 2), state(4, 1, 0, 2), state(4, 1, 1, 2)]
    plan = make_plan(places((2, 2), {0: [node[3]], 1: [node[0]], 2: [node[2]], 3: [node[1]]}))
    assert plan is not None
    assert plan.notes == ()
    got = [(fetch.rank, fetch.state.island, fetch.state.shard, fetch.has_inner) for fetch in plan.fetches]
    assert [(rank, shard) for rank, _, shard, _ in got] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {island for rank, island, _, _ in got if rank < 2} != {island for rank, island, _, _ in got if rank >= 2}
    assert all(has_inner for *_, has_inner in got)
    holders = {fetch.state: fetch.holder for fetch in plan.fetches}
    assert holders == {node[3]: 0, node[0]: 1, node[2]: 2, node[1]: 3}


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
    *_, newest = folder.find(1).states
    assert folder.parse(folder.read(newest), newest) == [{"step": 3}, {"step": 3}]
