"""Kills of ranks, nodes and whole runs at every k-th instant of a run, under every strategy.

A run of 12 steps saves every second step. It is started again and again, each time with `--train.resume auto`, and
killed at a named instant: while it prepares, resumes, trains, syncs, saves or ends. At last it may go on to its end.
After every kill the other ranks must end by themselves, and the newest checkpoint must be intact and no older than it
was. The end state must equal the end state of a run that nobody disturbed.

Islands of one rank are killed with all timeouts of the trainer, ten minutes for a collective: the other one must end
within ten seconds. They meet in a store that the campaign hosts, as torchrun's agent would, or in one that rank 0
hosts, as without torchrun. In a quarter of the starts the other one is late: it begins when this one has died.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.victims import (
    ISLANDS,
    LIMIT_S,
    PEER_TIMEOUT_S,
    STEPS,
    STRATEGIES,
    TWO_NODES,
    EndState,
    Instant,
    Run,
    Strategy,
    Victim,
    difference,
)
from tests.support.record import Row

KILLS_EACH, EACH_RUN = 40, 5
"""The kills of each strategy, and of each of its runs."""
PROMISE_S = 10.0
_AT_ONCE = 4  # strategies: ranks that wait for a lost one leave the processors to others

Attack = Callable[[Victim, Strategy, int], None]
"""Kills ranks of a run, of which one has stopped itself."""


def _rank(victim: Victim, strategy: Strategy, rank: int) -> None:
    victim.send(signal.SIGKILL, [rank])


def _node(victim: Victim, strategy: Strategy, rank: int) -> None:
    victim.send(signal.SIGKILL, strategy.place.node(rank))


def _all(victim: Victim, strategy: Strategy, rank: int) -> None:
    victim.send(signal.SIGKILL, range(strategy.place.num_ranks))


def _two_in_turn(victim: Victim, strategy: Strategy, rank: int) -> None:
    victim.send(signal.SIGKILL, [rank])
    time.sleep(0.1)
    victim.send(signal.SIGKILL, [(rank + 1) % strategy.place.num_ranks])


def _stopped(victim: Victim, strategy: Strategy, rank: int) -> None:
    """A rank that stands still for a while, then dies: a machine that swaps, and is then taken away."""
    time.sleep(1)
    victim.send(signal.SIGKILL, [rank])


ATTACKS: tuple[Attack, ...] = (_rank, _node, _rank, _all, _rank, _two_in_turn, _stopped)


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
    ends_s: list[float] = field(default_factory=list)
    """The seconds between each kill and the end of the last rank."""
    bound: float = 0.0
    """The largest difference of an eval loss from the undisturbed run's, relative, under islands."""
    by_step: Counter[int] = field(default_factory=Counter)
    """The number of kills by the newest complete step at that time."""

    @staticmethod
    def of(parts: Iterable[Tally]) -> Tally:
        """Return the sum of several tallies."""
        whole = Tally()
        for part in parts:
            for name, value in vars(part).items():
                before = getattr(whole, name)
                setattr(whole, name, max(before, value) if name == "bound" else before + value)
        return whole

    def compare(self, found: EndState, expected: EndState, where: str, *, is_exact: bool) -> None:
        """Count a difference of end states, or widen the bound where the strategy promises no equality."""
        if not is_exact:
            self.bound = max(self.bound, abs(found.eval_loss / expected.eval_loss - 1))
        elif problem := difference(found, expected):
            self.differing.append(f"{where}: {problem}")

    def harms(self) -> dict[str, int]:
        """The harms by name; prints them."""
        for problem in (*self.hangs, *self.unreadable, *self.differing, *self.failed):
            print(problem, file=sys.stderr, flush=True)
        return {
            "hangs": len(self.hangs), "unreadable folders": len(self.unreadable),
            "end states that differ": len(self.differing), "restarts that failed": len(self.failed),
        }  # fmt: skip


def strike(run: Run, instant: Instant, attack: Attack, tally: Tally, *, is_late: bool = False, **options: Any) -> bool:
    """Start the run, kill some of it at an instant, and check what is left. False if it had ended before.

    Args:
        run: the run.
        instant: of the rank that stops first.
        attack: kills.
        tally: gets what was found.
        is_late: the other ranks begin when the attack is over.
        options: of `Victim.start`.
    """
    newest, victim = run.newest_step(), run.start(instant=instant, **options)
    others = [rank for rank in range(run.strategy.place.num_ranks) if rank != instant.rank]
    if is_late:
        victim.send(signal.SIGSTOP, others)
    where = f"{instant}; log: {victim.log}"
    if victim.reaches_instant(3 * LIMIT_S):
        attack(victim, run.strategy, instant.rank)
    victim.send(signal.SIGCONT, others)
    struck_s = time.monotonic()
    if left := victim.wait(LIMIT_S):
        tally.hangs.append(f"{where}: ranks {left} after {LIMIT_S:g} s")
    if not victim.killed:
        return False
    tally.kills += 1
    tally.by_step[newest] += 1
    tally.ends_s.append(time.monotonic() - struck_s)
    if tally.ends_s[-1] > PROMISE_S:
        print(f"  {tally.ends_s[-1]:.1f} s after {where}", file=sys.stderr, flush=True)
    try:
        found = run.newest_step()
        if found < newest:
            tally.unreadable.append(f"{where}: the newest checkpoint was step {newest}, and is step {found}")
    except ValueError as error:
        tally.unreadable.append(f"{where}: {error}")
    return True


def campaign(folder: Path, kills_each: int, names: Iterable[str] = STRATEGIES) -> Tally:
    """Kill runs of strategies until each has been killed `kills_each` times, and return what was found."""
    shutil.rmtree(folder, ignore_errors=True)
    tasks = [(name, folder / name.replace(" ", "-").replace(",", ""), kills_each) for name in names]
    # Processes, not threads: a thread that starts a rank asks all ranks of its process whether they have ended, and
    # takes the exit code of one away from the thread that waits for it.
    with ProcessPoolExecutor(_AT_ONCE, mp_context=multiprocessing.get_context("spawn")) as pool:
        return Tally.of(pool.map(_tally_of, *zip(*tasks, strict=True)))


def _tally_of(name: str, folder: Path, kills_each: int) -> Tally:
    """Kill runs of one strategy at every k-th instant."""
    strategy, tally, began_s = STRATEGIES[name], Tally(), time.monotonic()
    folder.mkdir(parents=True)
    whole = Run(strategy, folder / "undisturbed")
    num_calls, expected = whole.count_calls(), whole.end_state()
    starts = 0
    for number in range(kills_each):
        if starts == 0:
            run, tally.runs = Run(strategy, folder / f"run-{number}"), tally.runs + 1
        # A run that goes on has fewer calls than one that begins, so it is killed early more often.
        call = 1 + num_calls * (7 * number % kills_each) // kills_each // (1 + starts)
        instant = Instant(rank=number % strategy.place.num_ranks, call=call)
        starts += 1
        if (
            strike(run, instant, ATTACKS[number % len(ATTACKS)], tally)
            and starts < EACH_RUN
            and number + 1 < kills_each
        ):
            continue
        starts = 0
        if problem := run.finish():
            tally.failed.append(f"{name}, {run.folder}: {problem}")
            continue
        tally.compare(run.end_state(), expected, f"{name}, {run.folder}", is_exact=strategy.is_exact)
    print(f"  {name}: {tally.kills} kills in {time.monotonic() - began_s:.0f} s; {tally.harms()}", file=sys.stderr)
    return tally


@campaign_row("kills")
def row(bench: Bench) -> Row:
    """Kill runs of every strategy."""
    names = ["cache host", "islands"] if bench.quick else STRATEGIES
    tally = campaign(bench.out / "kills", 2 if bench.quick else KILLS_EACH, names)
    phases = ", ".join(f"{count} at step {step}" for step, count in sorted(tally.by_step.items()))
    return faults_row(
        claim="kills of ranks, nodes and whole runs at calls of laconic, all strategies",
        tried=tally.kills,
        at_least=2 if bench.quick else 500,
        harms=tally.harms(),
        note=(
            f"{tally.runs} runs of {STEPS} steps on 2 to 4 ranks under {len(STRATEGIES)} strategies, each killed up to "
            f"{EACH_RUN} times, at calls of laconic's functions that are spread over the run, and started again: one "
            "rank, two in turn, a node, all, or a rank that first stands still. The other ranks ended "
            f"{max(tally.ends_s):.1f} s after a kill at the latest; a rank waits {PEER_TIMEOUT_S:g} s for its peers. "
            f"Kills by the newest complete checkpoint: {phases}. End states are equal to the bit in weights, optimizer "
            "state and the loss of every step; those of islands, which go on from the last sync, within "
            f"{tally.bound:.2%} of the undisturbed eval loss."
        ),
    )


# -- islands -----------------------------------------------------------------------------------------------------------

KILLS_OF_ISLANDS = 400
KINDS = {
    "whole": Strategy(sections={"sync": ISLANDS}, place=TWO_NODES, is_exact=False),
    "streamed": Strategy(
        sections={"sync": {**ISLANDS, "every": 4, "fragments": 2, "overlap": 1}}, place=TWO_NODES, is_exact=False
    ),
}
"""The two ways in which islands sync: all at once, and fragment by fragment behind training."""


def kill_islands(folder: Path, kind: str, num: int, *, of: int | None = None) -> Tally:
    """Kill one of two islands, `num` times at every k-th instant of a run that has `of` such instants."""
    folder.mkdir(parents=True)
    tally, of = Tally(), of or num
    whole = Run(KINDS[kind], folder / "undisturbed", timeout_s=600.0)
    num_calls, starts = whole.count_calls(begins="published"), 0
    for number in range(num):
        if starts == 0:
            run, tally.runs = Run(KINDS[kind], folder / f"run-{number}", timeout_s=600.0), tally.runs + 1
        rank, hosts = number % 2, number // 2 % 2 == 0
        is_late = not hosts and number // 4 % 2 == 0  # then it waits for the other soon after it has published
        call = 1 if is_late else 1 + num_calls * (7 * number % of) // of // (1 + starts)
        instant = Instant(rank=rank, call=call, begins="joined" if hosts else "published")
        is_killed = strike(run, instant, _rank, tally, is_late=is_late, rank_0_hosts=hosts, grace_s=None)
        starts = (starts + 1) % EACH_RUN if is_killed else 0
    return tally


@campaign_row("kills-of-islands", section="mend")
def islands(bench: Bench) -> Row:
    """Kill ranks of islands."""
    num, folder = 8 if bench.quick else KILLS_OF_ISLANDS, bench.out / "island-kills"
    shutil.rmtree(folder, ignore_errors=True)
    with ProcessPoolExecutor(len(KINDS), mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = pool.map(kill_islands, [folder / kind for kind in KINDS], KINDS, [num // 2] * 2)
        tally = Tally.of(parts)
    ends = sorted(tally.ends_s)
    return faults_row(
        claim="kills of islands at calls of laconic",
        tried=tally.kills,
        at_least=1 if bench.quick else 300,
        harms={f"ranks left for more than {PROMISE_S:g} s": sum(end_s > PROMISE_S for end_s in ends)},
        note=(
            "Two islands of one rank, one killed at calls that are spread over the whole run, once the ranks know of "
            "each other; in a quarter of the starts the other one is late and comes after the kill. Half of the starts "
            "met in a store of rank 0, the others in one of the launcher. The other rank ended "
            f"{ends[len(ends) // 2]:.1f} s after the kill (median), {ends[-1]:.1f} s at the latest."
        ),
    )
