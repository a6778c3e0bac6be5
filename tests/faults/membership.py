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
from collections.abc import Iterator
from pathlib import Path

from laconic import Membership
from tests.faults.bench import Bench, Found, campaign
from tests.faults.islanders import Island, equal_rounds, meeting

NUM_ISLANDS, TIMEOUT_S = 4, 6.0
_CHANGES = 100
_STEP_S = 0.05
_CALLS_EACH = 31


HARMS = ("steps or syncs lost by the others", "rounds that differ", "wait above the timeout", "island left behind")


def _change(options: dict[str, object], size: int, folder: Path, num: int) -> Iterator[str]:
    """Let islands of `size` ranks die and come `num` times."""
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
            yield from _harms(living, seen)
            victim.kill()
            seen = [len(island.rounds()) for island in living]
            newcomer = start(**life)
            newcomer.wait_for("entered")
            _go_on(living, NUM_ISLANDS)
            yield from _harms(living, seen)
            living.append(newcomer)
            everyone.append(newcomer)
        yield from (f"{HARMS[1]}: {number}" for number in equal_rounds(island.rounds() for island in everyone)[1])


def _go_on(living: list[Island], num_islands: int) -> None:
    """Wait until all have taken part in two rounds of `num_islands`, after the change."""
    begun = max(island.rounds()[-1].number for island in living)
    for island in living:
        deadline = time.monotonic() + 60
        while sum(each.num_islands == num_islands and each.number > begun for each in island.rounds()) < 2:
            if time.monotonic() > deadline or any(process.exitcode is not None for process in island.processes):
                return
            time.sleep(0.02)


def _harms(living: list[Island], seen: list[int]) -> Iterator[str]:
    """The harms of the living islands, in words; `seen` has the last round that each had seen."""
    for island, before in zip(living, seen, strict=True):
        rounds = island.rounds()[max(0, before - 1) :]
        pairs = list(itertools.pairwise(rounds))
        if any(later.number - earlier.number != 1 for earlier, later in pairs) or (
            len({later.step - earlier.step for earlier, later in pairs}) > 1
        ):
            yield f"{HARMS[0]}: {rounds}"
        if any(each.exposed_s > TIMEOUT_S for each in rounds[1:]):
            yield f"{HARMS[2]}: {rounds}"
        if any(process.exitcode is not None for process in island.processes):
            yield f"{HARMS[3]}: {island.folder}"


@campaign(
    "island-dies",
    "one of four islands dies or is stuck, another comes, and the others train on",
    harms=HARMS,
)
def changes(bench: Bench) -> Found:
    """Let islands of one and of two ranks, whole and streamed in four bits, die and come."""
    streamed: dict[str, object] = {"every": 6, "fragments": 3, "overlap": 1, "codec": "int4", "error_feedback": True}
    found, num = [], 2 if bench.quick else _CHANGES // 4
    for size, options in {1: dict[str, object](), 2: streamed}.items():
        place = bench.out / f"membership-{size}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        found += list(_change(options, size, place, num))
    return 4 * num, found, f"as many deaths as arrivals; the timeout is {TIMEOUT_S:g} s."
