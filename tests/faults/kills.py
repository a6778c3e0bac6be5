"""Kills of ranks, nodes and whole runs at random instants, under every strategy.

A run of 12 steps saves every second step. It is started again and again, each time with `--train.resume auto`, and
killed at a random instant: while it prepares, resumes, trains, syncs, saves or ends. At last it may go on to its end.
After every kill the other ranks must end by themselves, and the newest checkpoint must be intact and no older than it
was. The end state must equal the end state of a run that nobody disturbed.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.runs import LIMIT_S, PEER_TIMEOUT_S, STEPS, STRATEGIES, EndState, Run, difference
from tests.faults.victims import Place, Victim
from tests.support.record import Row

KILLS_EACH = 40
"""The kills of each strategy."""
_AT_ONCE = 4  # strategies: ranks that wait for a lost one leave the processors to others
_TALLY = "tally.json"


def _rank(victim: Victim, place: Place, chance: random.Random) -> None:
    victim.send(signal.SIGKILL, [chance.randrange(place.num_ranks)])


def _node(victim: Victim, place: Place, chance: random.Random) -> None:
    victim.send(signal.SIGKILL, place.node(chance.randrange(place.num_ranks)))


def _all(victim: Victim, place: Place, chance: random.Random) -> None:
    victim.send(signal.SIGKILL, range(place.num_ranks))


def _two_in_turn(victim: Victim, place: Place, chance: random.Random) -> None:
    first, second = chance.sample(range(place.num_ranks), 2)
    victim.send(signal.SIGKILL, [first])
    time.sleep(chance.uniform(0, 0.3))
    victim.send(signal.SIGKILL, [second])


def _stopped(victim: Victim, place: Place, chance: random.Random) -> None:
    """A rank that stands still for a while, then dies: a machine that swaps, and is then taken away."""
    rank = chance.randrange(place.num_ranks)
    victim.send(signal.SIGSTOP, [rank])
    time.sleep(chance.uniform(0, 2))
    victim.send(signal.SIGKILL, [rank])


ATTACKS: tuple[Callable[[Victim, Place, random.Random], None], ...] = (
    _rank, _rank, _rank, _node, _all, _two_in_turn, _stopped,
)  # fmt: skip


@dataclass(kw_only=True)
class Tally:
    """The counts and the problems of a campaign."""

    kills: int = 0
    """The starts of a run in which at least one rank was killed."""
    runs: int = 0
    hangs: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Starts that ended with an error although nobody disturbed them."""
    slowest_s: float = 0.0
    """The longest time between a kill and the end of the last rank."""
    bound: float = 0.0
    """The largest difference of an eval loss from the undisturbed run's, relative, under islands."""
    by_step: Counter[int] = field(default_factory=Counter)
    """The number of kills by the newest complete step at that time."""

    @staticmethod
    def of(parts: Iterable[Tally]) -> Tally:
        """Return the sum of several tallies."""
        whole = Tally()
        for part in parts:
            whole.kills, whole.runs = whole.kills + part.kills, whole.runs + part.runs
            for name in ("hangs", "unreadable", "differing", "failed"):
                getattr(whole, name).extend(getattr(part, name))
            whole.slowest_s, whole.bound = max(whole.slowest_s, part.slowest_s), max(whole.bound, part.bound)
            whole.by_step += part.by_step
        return whole

    def write(self, path: Path) -> None:
        """Keep the tally in a file."""
        path.write_text(json.dumps(vars(self)))

    @staticmethod
    def read(path: Path) -> Tally:
        """Return the tally of `write`."""
        values = json.loads(path.read_text())
        by_step = Counter({int(step): count for step, count in values.pop("by_step").items()})
        return Tally(**values, by_step=by_step)

    def compare(self, found: EndState, expected: EndState, where: str, *, is_exact: bool) -> None:
        """Count a difference of end states, or widen the bound where the strategy promises no equality."""
        if not is_exact:
            self.bound = max(self.bound, abs(found.eval_loss / expected.eval_loss - 1))
        elif problem := difference(found, expected):
            self.differing.append(f"{where}: {problem}")


def campaign(folder: Path, kills_each: int, *, seed: int = 0, names: list[str] | None = None) -> Tally:
    """Kill runs of every strategy until each has been killed `kills_each` times, and return what was found.

    A campaign that goes on in the same `folder` takes over the strategies that it has finished.
    """
    tasks = [
        (name, folder / name.replace(" ", "-").replace(",", ""), kills_each, seed + index)
        for index, name in enumerate(names or STRATEGIES)
    ]
    # Processes, not threads: a thread that starts a rank asks all ranks of its process whether they have ended, and
    # takes the exit code of one away from the thread that waits for it.
    with ProcessPoolExecutor(_AT_ONCE, mp_context=multiprocessing.get_context("spawn")) as pool:
        return Tally.of(pool.map(_tally_of, *zip(*tasks, strict=True)))


def _tally_of(name: str, folder: Path, kills_each: int, seed: int) -> Tally:
    """Return the tally of one strategy, which an earlier campaign may have finished."""
    if (folder / _TALLY).exists():
        return Tally.read(folder / _TALLY)
    shutil.rmtree(folder, ignore_errors=True)
    tally, began_s = Tally(), time.monotonic()
    _attack_strategy(name, folder, kills_each, seed, tally)
    tally.write(folder / _TALLY)
    print(
        f"  {name}: {tally.kills} kills in {time.monotonic() - began_s:.0f} s; {len(tally.hangs)} hangs, "
        f"{len(tally.unreadable)} unreadable, {len(tally.differing)} differing, {len(tally.failed)} failed",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return tally


def _attack_strategy(name: str, folder: Path, kills_each: int, seed: int, tally: Tally) -> None:
    strategy, chance = STRATEGIES[name], random.Random(seed)
    folder.mkdir(parents=True)
    for folder_name in ("first", "undisturbed"):  # the very first start waits for the fork server
        whole, began_s = Run(strategy, folder / folder_name), time.monotonic()
        if problem := whole.finish():
            tally.failed.append(f"{name}, undisturbed: {problem}")
            return
    span_s, expected = time.monotonic() - began_s, whole.end_state()
    done, number = 0, 0
    while done < kills_each:
        number += 1
        run = Run(strategy, folder / f"run-{number}")
        tally.runs += 1
        for _ in range(min(chance.randint(3, 8), kills_each - done)):
            where = f"{name}, run {number}, kill {done + 1}"
            if not _attack(run, chance.uniform(0.05, span_s), chance, where, tally):
                span_s *= 0.9  # the machine is quicker now than it was for the undisturbed run
                break
            done += 1
        if problem := run.finish():
            tally.failed.append(f"{name}, run {number}: {problem}")
            continue
        tally.compare(run.end_state(), expected, f"{name}, run {number}", is_exact=strategy.is_exact)


def _attack(run: Run, after_s: float, chance: random.Random, where: str, tally: Tally) -> bool:
    """Start the run, kill some of it after `after_s` seconds, and check what is left. False if it had ended before."""
    newest = run.newest_step()
    victim = run.start()
    time.sleep(after_s)
    chance.choice(ATTACKS)(victim, run.strategy.place, chance)
    struck_s = time.monotonic()
    if left := victim.wait(LIMIT_S):
        tally.hangs.append(f"{where}: ranks {left} after {LIMIT_S:g} s; log: {victim.log}")
    if not victim.killed:
        return False
    tally.kills += 1
    tally.by_step[newest] += 1
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - struck_s)
    try:
        found = run.newest_step()
        if found < newest:
            tally.unreadable.append(f"{where}: the newest checkpoint was step {newest}, and is step {found}")
    except ValueError as error:
        tally.unreadable.append(f"{where}: {error}")
    return True


@campaign_row("kills")
def row(bench: Bench) -> Row:
    """Kill runs of every strategy at random instants."""
    folder = bench.out / "kills"
    tally = campaign(folder, 2 if bench.quick else KILLS_EACH)
    harms = {
        "hangs": len(tally.hangs), "unreadable folders": len(tally.unreadable),
        "end states that differ": len(tally.differing), "restarts that failed": len(tally.failed),
    }  # fmt: skip
    for problem in (*tally.hangs, *tally.unreadable, *tally.differing, *tally.failed):
        print(problem, file=sys.stderr, flush=True)
    phases = ", ".join(f"{count} at step {step}" for step, count in sorted(tally.by_step.items()))
    return faults_row(
        claim="kills of ranks, nodes and whole runs at random instants, all strategies",
        tried=tally.kills,
        at_least=500,
        harms=harms,
        note=(
            f"{tally.runs} runs of {STEPS} steps on 2 to 4 ranks under {len(STRATEGIES)} strategies, each killed 3 to "
            "8 times at a random instant and started again: one rank, two in turn, a node, all, or a rank that first "
            f"stands still. The other ranks ended {tally.slowest_s:.1f} s after a kill at the latest; a rank waits "
            f"{PEER_TIMEOUT_S:g} s for its peers. Kills by the newest complete checkpoint: {phases}. End states are "
            "equal to the bit in weights, optimizer state and the loss of every step; those of islands, which go on "
            f"from the last sync, within {tally.bound:.2%} of the undisturbed eval loss."
        ),
    )
