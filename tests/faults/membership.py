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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from laconic import Membership
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.islanders import Island, equal_rounds, meeting
from tests.support.record import Row

NUM_ISLANDS, TIMEOUT_S = 4, 6.0
_CHANGES, _QUICK_CHANGES = 50, 3
_STEP_S = 0.05
_CALLS_EACH = 31


@dataclass(kw_only=True)
class Counts:
    """The harm that deaths and arrivals did."""

    tried: int = 0
    lost_steps: int = 0
    """Steps that islands did not take, or syncs that they missed."""
    differ: int = 0
    """Rounds after which islands differed."""
    too_long: int = 0
    """Waits for longer than the timeout."""
    dropped: int = 0
    """Islands that the others left behind although nothing had happened to them."""
    waits_s: list[float] = field(default_factory=list)
    """The longest wait of an island after each change."""


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
            _note(deaths, living, seen)
            victim.kill()
            seen = [len(island.rounds()) for island in living]
            newcomer = start(**life)
            newcomer.wait_for("entered")
            _go_on(living, NUM_ISLANDS)
            _note(arrivals, living, seen)
            living.append(newcomer)
            everyone.append(newcomer)
        deaths.differ = len(equal_rounds(everyone)[1])
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


def _note(counts: Counts, living: list[Island], seen: list[int]) -> None:
    counts.tried += 1
    longest = 0.0
    for island, before in zip(living, seen, strict=True):
        rounds = island.rounds()[max(0, before - 1) :]
        gaps = [later.step - earlier.step for earlier, later in itertools.pairwise(rounds)]
        missed = [later.number - earlier.number - 1 for earlier, later in itertools.pairwise(rounds)]
        counts.lost_steps += sum(missed) + sum(gap != gaps[0] for gap in gaps)
        longest = max([longest, *(each.exposed_s for each in rounds[1:])])
        counts.dropped += any(process.exitcode is not None for process in island.processes)
    counts.waits_s.append(longest)
    counts.too_long += longest > TIMEOUT_S


@cache
def _measured(folder: Path, quick: bool) -> tuple[Counts, Counts]:
    """Let islands of one and of two ranks, whole and streamed in four bits, die and come."""
    whole: dict[str, object] = {}
    streamed: dict[str, object] = {"every": 6, "fragments": 3, "overlap": 1, "codec": "int4", "error_feedback": True}
    deaths, arrivals = Counts(), Counts()
    for options, size in [(whole, 1)] if quick else [(whole, 1), (streamed, 2)]:
        place = folder / f"membership-{size}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        num = _QUICK_CHANGES if quick else _CHANGES // 2
        for total, found in zip((deaths, arrivals), _change(options, size, place, num), strict=True):
            for name, value in vars(found).items():
                setattr(total, name, getattr(total, name) + value)
    return deaths, arrivals


def _row(claim: str, counts: Counts, note: str) -> Row:
    waits = sorted(counts.waits_s)
    return faults_row(
        claim=claim,
        tried=counts.tried,
        at_least=_CHANGES,
        harms={
            "steps or syncs lost by the others": counts.lost_steps,
            "rounds after which islands differ": counts.differ,
            f"waits above the timeout ({TIMEOUT_S:g} s)": counts.too_long,
            "living islands left behind": counts.dropped,
        },
        note=f"{note} The others stood still once, for {waits[len(waits) // 2]:.2f} s (median) and at most "
        f"{waits[-1]:.2f} s, of which the timeout allows {TIMEOUT_S:g} s.",
    )


@campaign_row("island-dies")
def dies(bench: Bench) -> Row:
    """Measure the deaths."""
    deaths, _ = _measured(bench.out, bench.quick)
    note = "Killed two times of three, else stopped for good; islands of one rank, and of two, streamed in int4."
    return _row("one of four islands dies or is stuck, and the others train on", deaths, note)


@campaign_row("island-comes")
def comes(bench: Bench) -> Row:
    """Measure the arrivals."""
    _, arrivals = _measured(bench.out, bench.quick)
    return _row("a fourth island comes while three train on", arrivals, "After each of those deaths.")
