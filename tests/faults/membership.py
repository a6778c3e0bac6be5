"""Islands that die and come, while three others train on.

Four islands train. Again and again one of them is killed (SIGKILL) or stopped for good (SIGSTOP), at a named instant
([Note: Instants of a process] in victims.py), and when the others have gone on, another island comes. The others must
take every step, sync in every round, hold equal outer parameters after each round, and stand still no longer than the
timeout for a death, and as long as for any other round when an island comes.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path

from laconic import Membership
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.islanders import Island, equal_rounds, meeting
from tests.support.record import Row

NUM_ISLANDS, TIMEOUT_S = 4, 6.0
_CHANGES = 50
_STEP_S = 0.05
_CALLS_EACH = 31


Counts = Counter[str]
"""The harm that deaths or arrivals did, by kind, and how many were "tried"."""
HARMS = (
    "steps or syncs lost by the others",
    "rounds after which islands differ",
    "waits above the timeout",
    "living islands left behind",
)


def _change(options: dict[str, object], size: int, folder: Path, num: int) -> tuple[Counts, Counts]:
    """Let islands of `size` ranks die and come `num` times."""
    deaths, arrivals = Counts(), Counts()
    with meeting(folder) as (address, start):
        policy = Membership(rendezvous=address, islands=NUM_ISLANDS, timeout_s=TIMEOUT_S)
        life = {"policy": policy, "options": options, "last": 10**9, "step_s": _STEP_S, "size": size}
        living = [start(**life) for _ in range(NUM_ISLANDS)]
        everyone = list(living)
        for island in living:
            island.wait_for_round(1)
        for number in range(num):
            victim = living.pop(number % len(living))
            seen = [len(island.rounds()) for island in living]
            victim.strike(signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL, 1 + _CALLS_EACH * number)
            _go_on(living, NUM_ISLANDS - 1)
            deaths += _harms(living, seen)
            victim.kill()
            seen = [len(island.rounds()) for island in living]
            newcomer = start(**life)
            newcomer.wait_for("entered")
            _go_on(living, NUM_ISLANDS)
            arrivals += _harms(living, seen)
            living.append(newcomer)
            everyone.append(newcomer)
        deaths[HARMS[1]] = len(equal_rounds(everyone)[1])
    return deaths, arrivals


def _go_on(living: list[Island], num_islands: int) -> None:
    """Wait until all have taken part in two rounds of `num_islands`, after the change."""
    begun = max(island.rounds()[-1].number for island in living)
    for island in living:
        deadline = time.monotonic() + 60
        while sum(each.num_islands == num_islands and each.number > begun for each in island.rounds()) < 2:
            if time.monotonic() > deadline or any(process.exitcode is not None for process in island.processes):
                return
            time.sleep(0.02)


def _harms(living: list[Island], seen: list[int]) -> Counts:
    """What islands suffered after the rounds that they had seen."""
    found = Counts(tried=1)
    for island, before in zip(living, seen, strict=True):
        rounds = island.rounds()[max(0, before - 1) :]
        gaps = [later.step - earlier.step for earlier, later in itertools.pairwise(rounds)]
        found[HARMS[0]] += sum(later.number - earlier.number - 1 for earlier, later in itertools.pairwise(rounds))
        found[HARMS[0]] += sum(gap != gaps[0] for gap in gaps)
        found[HARMS[2]] += any(each.exposed_s > TIMEOUT_S for each in rounds[1:])
        found[HARMS[3]] += any(process.exitcode is not None for process in island.processes)
    return found


@cache
def _measured(bench: Bench) -> tuple[Counts, Counts]:
    """Let islands of one and of two ranks, whole and streamed in four bits, die and come."""
    streamed: dict[str, object] = {"every": 6, "fragments": 3, "overlap": 1, "codec": "int4", "error_feedback": True}
    found = Counts(), Counts()
    for size, options in {1: dict[str, object](), 2: streamed}.items():
        place = bench.out / f"membership-{size}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for total, part in zip(found, _change(options, size, place, 2 if bench.quick else _CHANGES // 2), strict=True):
            total.update(part)
    return found


def _row(claim: str, counts: Counts) -> Row:
    harms = {harm: counts[harm] for harm in HARMS}
    note = f"Islands of one rank, and of two, streamed in int4; the timeout is {TIMEOUT_S:g} s."
    return faults_row(claim=claim, tried=counts["tried"], at_least=_CHANGES, harms=harms, note=note)


@campaign_row("island-dies")
def dies(bench: Bench) -> Row:
    """Measure the deaths."""
    return _row("one of four islands dies or is stuck, and the others train on", _measured(bench)[0])


@campaign_row("island-comes")
def comes(bench: Bench) -> Row:
    """Measure the arrivals."""
    return _row("a fourth island comes while three train on", _measured(bench)[1])
