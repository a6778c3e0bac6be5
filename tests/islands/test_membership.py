"""Islands that come and go while the others train on, compared with one process."""

from __future__ import annotations

import atexit
import copy
import os
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic import LocalSteps, Membership
from laconic.codec import FloatCodec
from laconic.errors import JobError
from laconic.islands import elastic
from laconic.islands.agreements import Agreements, Outcome, Roster, RunEndedError, Verdict
from laconic.islands.all_reduce import IslandGroup
from laconic.islands.elastic import Entrance
from laconic.rehearse import ranks
from tests.faults.islanders import EVERY, Life, adamw, equal_rounds, live_by_turns, loss, make_model, meeting, rounds_in
from tests.reference.local_steps import ChangingIslands


def a_life(islands: int, last: int = 6, **given: Any) -> Life:
    """The life of an island of a run that begins with so many."""
    policy = Membership(rendezvous="meeting:1", islands=islands, timeout_s=4.0)
    return Life(**{"policy": policy, "last": last, "step_s": 0.1, **given})


def islands(
    folder: Path, lives: Sequence[Life], *, local: int = 1, seed: int | None = None
) -> tuple[list[Any], dict[int, int]]:
    """Let islands live, and assert that all have equal outer parameters after each round, to the bit.

    Returns the results of their first ranks, and the members of each round.
    """
    results = ranks(live_by_turns, lives, folder, jobs=len(lives), local=local, seed=seed, goes_on=True)
    members, different = equal_rounds(rounds_in(folder / f"island-{job}") for job in range(len(lives)))
    assert different == []
    return results[::local], members


@pytest.mark.parametrize(("fault", "seed"), [("dies_at", None), ("dies_at", 1), ("fails_at", None)])
def test_an_island_goes_and_another_comes(tmp_path: Path, fault: str, seed: int | None) -> None:
    """It dies, or diverges: then it takes part in its last round with a weight of nothing."""
    rounds, at = 16, 2 * EVERY + 2
    begin = partial(a_life, 3, rounds, step_s=0.08)
    lives = [begin(tokens=1), begin(tokens=5), begin(tokens=2, **{fault: at}), begin(tokens=3, comes_after=2)]
    (*staying, gone, coming), members = islands(tmp_path, lives, seed=seed)
    assert gone is None if fault == "dies_at" else isinstance(gone, JobError)
    in_third = 2 if fault == "dies_at" else 3  # which is repeated without the dead one
    assert [members[number] for number in (2, 3, rounds)] == [3, in_third, 3]
    for job in (0, 1):
        steps = [each.step for each in rounds_in(tmp_path / f"island-{job}")]
        assert steps == [EVERY * (n + 1) for n in range(rounds)], "no step is lost"
    results = [*staying, coming]
    numbers = [result["number"] for result in results]
    free = 2 if fault == "dies_at" else 3  # the one that diverges leaves after the other has come
    assert {result["slot"] for result in results} == {0, 1, free}
    tokens = dict(zip(numbers, (1, 5, 3), strict=True))
    [number_of_gone] = set(range(4)) - set(numbers)
    oracle = ChangingIslands(make_model(), adamw, every=EVERY)
    begun = {result["number"]: result["begun"] for result in results} | {number_of_gone: 0}
    assert EVERY < begun[3] < EVERY * (rounds - 1)
    for step in range(1, EVERY * rounds + 1):
        for number in [number for number, at in begun.items() if at + 1 == step]:
            oracle.come(number)
        if step == at:
            del oracle.members[number_of_gone]
        oracle.step(partial(loss, step=step), lambda number: (tokens | {number_of_gone: 2})[number])
    for result in results:
        for name, value in oracle.outer.items():
            torch.testing.assert_close(torch.tensor(result["outer"][name]), value, atol=2e-5, rtol=1e-4)


def test_those_that_wait_for_islands_that_have_died_begin_without_them(tmp_path: Path) -> None:
    dying, coming = a_life(2, dies_at=6), a_life(2, comes_after=1)  # they queue up, and would enter then
    results, members = islands(tmp_path, [dying, dying, coming, coming])
    assert results[:2] == [None, None]
    assert {result["number"] for result in results[2:]} == {0, 1}, "of a new generation"
    assert members == dict.fromkeys(range(1, 7), 2)


@pytest.mark.parametrize(("founders", "newcomers", "dies_at"), [(2, 2, 8), (1, 1, 8)])
def test_newcomers_hear_that_the_others_are_gone(founders: int, newcomers: int, dies_at: int, tmp_path: Path) -> None:
    """They die after the round with which these have entered, before the one to which they would listen.

    Two that enter at once do not wait for each other: neither will begin a round.
    """
    dying, coming = a_life(founders, 9, dies_at=dies_at), a_life(founders, 9, comes_after=1)
    results = islands(tmp_path, [*[dying] * founders, *[coming] * newcomers])[0]
    gone = ", ".join(map(str, range(founders)))
    for newcomer in results[founders:]:
        assert f"islands {gone} have given no sign of life for 20 s; start this one again" in str(newcomer)


@pytest.mark.parametrize("dying", range(2))
def test_another_lead_tells_newcomers_the_rest(dying: int, tmp_path: Path) -> None:
    """One of two founders, of which one is the lead, dies when a newcomer has heard two fragments of three."""
    life = a_life(2, 12, step_s=0.2, options={"every": 6, "fragments": 3, "overlap": 1, "codec": "int8"})
    lives = [life, life, replace(life, comes_after=1)]
    lives[dying] = replace(life, dies_at=9)
    results, members = islands(tmp_path, lives)
    assert results[dying] is None
    assert results[2]["begun"] == 11, "after the fifth round"
    assert [members[number] for number in (2, 3, 4, 5, 11)] == [2, 3, 3, 2, 2]


def test_an_island_that_waits_for_others_says_so_once(tmp_path: Path) -> None:
    policy = Membership(rendezvous="meeting:1", islands=2, timeout_s=4.0, start_timeout_s=60.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        [(alone, *_), _] = islands(tmp_path, [a_life(2, policy=policy)])
    assert "1 of 2 islands have come to meeting:1 after 60 s" in str(alone)
    assert [str(each.message) for each in said] == ["1 of 2 islands have come to meeting:1; this island waits"]


def test_a_newcomer_that_the_state_does_not_reach_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on with the round, although it lives."""

    def fail(group: IslandGroup, vectors: object, lead: int, listeners: Sequence[int]) -> list[Any]:
        if listeners:
            raise RuntimeError("Connection closed by peer")
        return []

    monkeypatch.setattr(IslandGroup, "tell", fail)
    (*staying, newcomer), members = islands(tmp_path, [*[a_life(2, 9)] * 2, a_life(2, 9, comes_after=1)])
    assert {result["number"] for result in staying} == {0, 1}
    assert members == dict.fromkeys(range(1, 10), 2)
    assert "the other islands have gone on without this one (island 2)" in str(newcomer)


def test_a_round_that_always_fails_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Counter[int]()

    def fail(exchange: elastic.ElasticExchange, *_: object) -> None:
        tries[exchange.number] += 1
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(elastic.ElasticExchange, "_reduce", fail)
    for result in islands(tmp_path, [a_life(2)] * 2)[0]:
        assert "round 1 of the islands has failed again and again, although all 2 live" in str(result)
    assert max(tries.values()) == elastic._MOST_TRIES


def test_a_watcher_hears_that_the_run_has_ended_while_its_island_computes() -> None:
    def job() -> None:
        agreements = [Agreements(dist.TCPStore("meeting", 1), "test", "here") for _ in range(2)]
        watcher = elastic._Watcher(agreements[0], 0)
        with pytest.raises(RunEndedError):
            agreements[1]._run.damaged("come", "it is no number")
        assert watcher.end is None
        time.sleep(2)
        assert "damaged entry, come" in str(watcher.end)

    ranks(job)


def test_what_was_in_flight_is_applied_before_an_island_enters() -> None:
    """As of a checkpoint that was saved between the sync and its application."""

    def job() -> None:
        mesh = laconic.init_mesh("cpu", islands=1, nodes=1, local=1)

        def begin(run: str, state: dict[str, Any] | None = None) -> tuple[nn.Module, LocalSteps]:
            model = make_model()
            policy = Membership(rendezvous="meeting:1", islands=1)
            given: dict[str, Any] = {"every": 6, "fragments": 3, "overlap": 1, "codec": "fp32", "run_id": run}
            local = LocalSteps(model, adamw(model), mesh=mesh, membership=policy, **given)
            if state is not None:
                local.load_state_dict(state)
            local.enter()
            return model, local

        model, local = begin("one")
        for step in range(1, 3):
            loss(model, 0, step).backward()
            local.step()
            local.zero_grad()
        _, resumed = begin("two", copy.deepcopy(local.state_dict()))
        local.finish()
        for own, other in zip(local.fragments, resumed.fragments, strict=True):
            assert torch.equal(own.flat, other.flat)
        assert resumed.rounds == local.rounds == 1

    ranks(job)


@pytest.mark.machine
def test_an_island_of_processes_dies_and_another_comes(tmp_path: Path) -> None:
    """The other comes when the islands have gone on without the dead one, so it takes the free slot."""
    with meeting(tmp_path) as (address, start):
        begin = partial(start, policy=Membership(rendezvous=address, islands=3, timeout_s=6.0), last=10**9)
        staying, dying = [begin(step_s=0.08) for _ in range(2)], begin(step_s=0.08, dies_at=2 * EVERY + 2)
        staying[0].wait_for_round(3)
        living = [*staying, begin(step_s=0.08)]
        living[-1].wait_for_round(4)
        last = living[-1].rounds()[0].number
        for island in staying:
            island.wait_for_round(last)
        assert {(island.folder / "entered").read_text() for island in living} == {"0", "1", "2"}
        assert dying.processes[0].exitcode == -signal.SIGKILL
    members, different = equal_rounds(island.rounds() for island in (*living, dying))
    assert different == []
    assert [members[number] for number in (2, 3, last)] == [3, 2, 3]


def test_stuck_and_diverging_islands_are_left_behind(tmp_path: Path) -> None:
    options = {"every": 6, "fragments": 3, "overlap": 1, "codec": "int4", "error_feedback": 0.5, "mixing": 0.25}
    policy = Membership(rendezvous="meeting:1", islands=3, timeout_s=3.0)
    life = Life(policy=policy, options=options, last=12)
    lives = [life, replace(life, is_stuck_at=6), replace(life, fails_at=14)]
    (staying, stuck, diverging), members = islands(tmp_path, lives, local=2)
    assert isinstance(stuck, JobError)
    assert "the other islands have gone on without this one" in str(stuck)
    assert isinstance(diverging, JobError)
    assert "NaN, infinite or too large on this island; the others go on without it" in str(diverging)
    assert [members[number] for number in (1, 2, 3, 4, 5, 11)] == [3, 3, 2, 2, 2, 1]
    assert all(torch.tensor(values).isfinite().all() for values in staying["outer"].values())


def test_ended_runs_begin_anew(tmp_path: Path) -> None:
    (_, _, *resumed), members = islands(tmp_path, [*[a_life(2, 4)] * 2, *[a_life(2, resumes=True)] * 2])
    assert members == dict.fromkeys(range(1, 7), 2)
    assert {result["number"] for result in resumed} == {0, 1}, "the numbers of a new generation"
    assert [each.number for each in rounds_in(tmp_path / "island-2")] == [5, 6], "from the checkpoint's rounds on"


class LongerFloats(FloatCodec):
    """As another release might code."""

    def payload_bytes(self, numel: int) -> int:
        return super().payload_bytes(numel) + 4


def job_refused() -> None:
    """Bad settings, in this order; then an island that is not inside."""
    model, mesh = make_model(), laconic.init_mesh("cpu", islands=1, nodes=1, local=1)
    refusals: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("this run has no name", {}, {"run_id": None}),
        ("1 of 2 islands have come to meeting:1", {}, {}),
        ("every is 6 on this island and 3 on the islands", {}, {"every": 2 * EVERY}),
        (
            "bytes of 4,096 values is 16388 on this island and 16384 on the islands",
            {},
            {"codec": LongerFloats("fp32", torch.float32)},
        ),
        ("leave it out, and save checkpoints", {}, {"recovery": "/tmp"}),
        ("must be HOST:PORT", {"rendezvous": "here"}, {}),
        ("Membership(islands=0) must be at least 1", {"islands": 0}, {}),
        ("timeout_s=0", {"timeout_s": 0}, {}),
    ]

    def start(policy: dict[str, Any], **options: Any) -> LocalSteps:
        membership = Membership(**{"rendezvous": "meeting:1", "timeout_s": 2.0, "start_timeout_s": 0.5, **policy})
        given = {"codec": "fp32", "every": EVERY, "run_id": "test", **options}
        return LocalSteps(model, adamw(model), mesh=mesh, membership=membership, **given)

    with (
        mock.patch.object(dist, "TCPStore", side_effect=dist.DistNetworkError("refused")),
        pytest.raises(JobError, match="no rendezvous answers at meeting:1"),
    ):
        start({"islands": 1})
    for message, policy, options in refusals:
        with pytest.raises(ValueError, match=re.escape(message)):
            start({"islands": 2, **policy}, **options).enter()
    local = start({"islands": 1}, run_id="other")
    with pytest.raises(RuntimeError, match=r"call LocalSteps.enter\(\) before the first forward"):
        local.step()
    assert local.enter() == local.enter() == 0
    local.leave()
    with pytest.raises(RuntimeError, match="has not entered"):
        local.step()  # it is outside again


def test_bad_settings_are_refused() -> None:
    ranks(job_refused)
    assert Membership(rendezvous="host:1", islands=3).count(4) == 1, "a launch is an island"


def vote(outcomes: Sequence[Outcome], delays_s: Sequence[float], patience_s: float) -> Verdict:
    """Vote as one of the ranks."""
    everyone, number = tuple(range(len(outcomes))), int(os.environ["LACONIC_JOB"])
    roster = Roster(number=0, members=everyone, slots=everyone, num_seen=len(outcomes), round=1)
    time.sleep(delays_s[number])
    agreements = Agreements(dist.TCPStore("meeting", 1), "test", "here")
    return agreements.vote(roster, 1, outcomes[number], num_ranks=len(outcomes), patience_s=patience_s)


def test_there_is_one_verdict_on_each_try() -> None:
    dice, seen = random.Random(5), set()
    for seed in range(60):
        outcomes = [Outcome.LOST if dice.random() < 0.1 else Outcome.DONE for _ in range(5)]
        delays_s, patience_s = [dice.random() * 0.02 for _ in outcomes], dice.choice([0.0, 20.0])
        verdicts = set(ranks(vote, outcomes, delays_s, patience_s, jobs=5, seed=seed))
        assert len(verdicts) == 1, "all ranks get the same"
        [verdict] = verdicts
        assert verdict.outcome is not Outcome.DONE or Outcome.LOST not in outcomes
        seen.add(verdict.outcome)
    assert seen == set(Outcome), "done, lost and late all happen"


def test_an_island_that_waits_answers_calls_until_it_gives_up() -> None:
    """Two of two have come, and no round ends: the first was called again meanwhile."""
    agreements = Agreements(dist.HashStore(), "test", "here")
    policy = Membership(rendezvous="meeting:1", islands=2, start_timeout_s=10.0)
    waiting = Entrance(agreements, policy, {})
    for number, call in enumerate(("", "3", "4")):
        agreements.set("call", call)
        assert waiting.wait(1.0) is None, number
        assert agreements.get(str, "answer/0") == call
    agreements.come()
    with pytest.raises(JobError, match="the islands at meeting:1 have not ended a round since this one came after 1"):
        waiting.wait(20.0)


def test_islands_leave_in_order_at_the_end_of_the_process() -> None:
    exchange = mock.Mock(spec=elastic.ElasticExchange)
    elastic._leave_at_exit.cache_clear()
    with mock.patch.object(atexit, "register") as register, mock.patch.object(elastic, "_entered", {exchange}):
        for _ in range(2):
            elastic._leave_at_exit()
        [[leave]] = [call.args for call in register.call_args_list]
        leave()
    exchange.leave.assert_called_once_with()


def test_the_first_proposal_of_a_roster_counts() -> None:
    store = dist.HashStore()
    agreements = [Agreements(store, "test", "here") for _ in range(4)]
    for _ in agreements:
        agreements[0].come()
    agreements[0].found(4)
    roster = agreements[1].roster(0)
    assert (roster.members, roster.round, roster.knowing(0), roster.new_in(0)) == ((0, 1, 2, 3), 0, [0, 1, 2, 3], ())
    agreements[3].leave(roster, 3)
    before = agreements[0].beats(roster.members)
    for number in (0, 2):
        agreements[number].beat(number)
    for each in agreements:
        each.propose(roster, 8, before, is_late=False, patience_s=0.05)
    following = agreements[1].next_roster(roster, 0.0)
    assert following is not None
    assert following.members == following.slots == (0, 2)
    assert agreements[0].come() == 4
    larger = agreements[2].enlarge(following, agreements[2]._queued(following), 9, until=11)
    assert (larger.members, larger.slots, larger.newcomers) == ((0, 2, 4), (0, 2, 1), (4,))
    assert [larger.knowing(each) for each in (10, 11)] == [[0, 2], [0, 2, 4]]
    assert agreements[3].welcome(4) == larger
