"""Kills of ranks, nodes and whole runs at every k-th instant of a run, under every strategy.

A run of 12 steps saves every second step. It is started again and again, each time with `--train.resume auto`, and
killed at a named instant: while it prepares, resumes, trains, syncs, saves or ends. At last it may go on to its end.
After every kill the other ranks must end by themselves, and the newest checkpoint must be intact and no older than it
was. The end state must equal the end state of a run that nobody disturbed.

Islands of one rank are also killed with all timeouts of the trainer, ten minutes for a collective. They meet in a store
that the campaign hosts, as torchrun's agent would, or in one that rank 0 hosts. In a quarter of the starts the other
one is late: it begins when this one has died.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.bench import Bench, Found, campaign
from tests.faults.victims import (
    ISLANDS,
    LIMIT_S,
    PEER_TIMEOUT_S,
    STEPS,
    STRATEGIES,
    TWO_NODES,
    EndState,
    Instant,
    Place,
    Run,
    Strategy,
    difference,
)

KILLS_EACH, EACH_RUN = 40, 5
"""The kills of each strategy, and of each of its runs."""
_AT_ONCE = 4  # strategies: ranks that wait for a lost one leave the processors to others

Attack = tuple[tuple[float, Callable[[Place, int], Iterable[int]]], ...]
"""Pauses in seconds, and who is killed after each, from the place of the run and the rank that has stopped."""
HARMS = ("hang", "unreadable folder", "end state that differs", "restart that failed")
_RANK: Attack = ((0.0, lambda place, rank: [rank]),)
ATTACKS: tuple[Attack, ...] = (
    _RANK,
    ((0.0, lambda place, rank: place.node(rank)),),
    _RANK,
    ((0.0, lambda place, rank: range(place.num_ranks)),),
    _RANK,
    (*_RANK, (0.1, lambda place, rank: [(rank + 1) % place.num_ranks])),
    ((1.0, lambda place, rank: [rank]),),  # a machine that swaps, and is then taken away
)


@dataclass(kw_only=True)
class Tally:
    """The counts and the problems of a campaign."""

    kills: int = 0
    """The starts of a run in which at least one rank was killed."""
    harms: list[str] = field(default_factory=list)
    """Texts that begin with one of `HARMS`."""
    ends_s: list[float] = field(default_factory=list)
    """The seconds between each kill and the end of the last rank."""
    bounds: list[float] = field(default_factory=list)
    """The differences of eval losses from the undisturbed run's, relative, under islands."""

    @staticmethod
    def of(parts: Iterable[Tally]) -> Tally:
        """Return the sum of several tallies."""
        whole = Tally()
        for part in parts:
            for name, value in vars(part).items():
                setattr(whole, name, getattr(whole, name) + value)
        return whole

    def compare(self, found: EndState, expected: EndState, where: str, *, is_exact: bool) -> None:
        """Count a difference of end states, or note the bound where the strategy promises no equality."""
        if not is_exact:
            self.bounds.append(abs(found.eval_loss / expected.eval_loss - 1))
        elif problem := difference(found, expected):
            self.harms.append(f"end state that differs: {where}: {problem}")


def strike(run: Run, instant: Instant, attack: Attack, tally: Tally, *, is_late: bool = False, **options: Any) -> bool:
    """Start the run, kill some of it at an instant, and check what is left. False if it had ended before.

    Args:
        run: the run.
        instant: of the rank that stops first.
        attack: who is killed then.
        tally: gets what was found.
        is_late: the other ranks begin when the attack is over.
        options: of `Victim.start`.
    """
    newest, victim, place = run.newest_step(), run.start(instant=instant, **options), run.strategy.place
    others = [rank for rank in range(place.num_ranks) if rank != instant.rank]
    if is_late:
        victim.send(signal.SIGSTOP, others)
    where = f"{instant}; log: {victim.log}"
    if victim.reaches_instant(3 * LIMIT_S):
        for pause_s, ranks in attack:
            time.sleep(pause_s)
            victim.send(signal.SIGKILL, list(ranks(place, instant.rank)))
    victim.send(signal.SIGCONT, others)
    struck_s = time.monotonic()
    if left := victim.wait(LIMIT_S):
        tally.harms.append(f"hang: {where}: ranks {left} after {LIMIT_S:g} s")
    if not victim.killed:
        return False
    tally.kills += 1
    tally.ends_s.append(time.monotonic() - struck_s)
    try:
        found = run.newest_step()
        if found < newest:
            tally.harms.append(f"unreadable folder: {where}: the newest was step {newest}, and is step {found}")
    except ValueError as error:
        tally.harms.append(f"unreadable folder: {where}: {error}")
    return True


def _tally_of(name: str, folder: Path, kills_each: int) -> Tally:
    """Kill runs of one strategy at every k-th instant."""
    strategy, tally, starts = STRATEGIES[name], Tally(), 0
    folder.mkdir(parents=True)
    whole = Run(strategy, folder / "undisturbed")
    num_calls, expected = whole.count_calls(), whole.end_state()
    for number in range(kills_each):
        if starts == 0:
            run = Run(strategy, folder / f"run-{number}")
        # A run that goes on has fewer calls than one that begins, so it is killed early more often.
        call = 1 + num_calls * (7 * number % kills_each) // kills_each // (1 + starts)
        instant, starts = Instant(rank=number % strategy.place.num_ranks, call=call), starts + 1
        is_killed = strike(run, instant, ATTACKS[number % len(ATTACKS)], tally)
        if is_killed and starts < EACH_RUN and number + 1 < kills_each:
            continue
        starts = 0
        if problem := run.finish():
            tally.harms.append(f"restart that failed: {name}, {run.folder}: {problem}")
            continue
        tally.compare(run.end_state(), expected, f"{name}, {run.folder}", is_exact=strategy.is_exact)
    return tally


def kill_islands(folder: Path, sync: dict[str, Any], num: int, *, of: int) -> Tally:
    """Kill one of two islands, `num` times at every k-th instant of a run that has `of` such instants."""
    folder.mkdir(parents=True)
    strategy, tally, starts = Strategy(sections={"sync": {**ISLANDS, **sync}}, place=TWO_NODES), Tally(), 0
    num_calls = Run(strategy, folder / "undisturbed", timeout_s=600.0).count_calls(begins="published")
    for number in range(num):
        if starts == 0:
            run = Run(strategy, folder / f"run-{number}", timeout_s=600.0)
        hosts = number // 2 % 2 == 0
        is_late = not hosts and number // 4 % 2 == 0  # then it waits for the other soon after it has published
        call = 1 if is_late else 1 + num_calls * (7 * number % of) // of // (1 + starts)
        instant = Instant(rank=number % 2, call=call, begins="joined" if hosts else "published")
        is_killed = strike(run, instant, _RANK, tally, is_late=is_late, rank_0_hosts=hosts, grace_s=None)
        starts = (starts + 1) % EACH_RUN if is_killed else 0
    return tally


@campaign(
    "kills",
    "kills of ranks, nodes and whole runs at calls of laconic, all strategies",
    harms=HARMS,
)
def kills(bench: Bench) -> Found:
    """Kill runs of every strategy, and islands."""
    root, kills_each = bench.out / "kills", 2 if bench.quick else KILLS_EACH
    shutil.rmtree(root, ignore_errors=True)
    names = ["cache host", "islands"] if bench.quick else list(STRATEGIES)
    # Processes, not threads: a thread that starts a rank asks all ranks of its process whether they have ended, and
    # takes the exit code of one away from the thread that waits for it.
    with ProcessPoolExecutor(_AT_ONCE, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_tally_of, name, root / name.replace(", ", "-"), kills_each) for name in names]
        for kind, sync in {"whole": {}, "streamed": {"every": 4, "fragments": 2, "overlap": 1}}.items():
            parts.append(pool.submit(kill_islands, root / kind, sync, 5 * kills_each, of=5 * kills_each))
        tally = Tally.of(part.result() for part in parts)
    note = (
        f"Runs of {STEPS} steps on 2 to 4 ranks, each killed up to {EACH_RUN} times and started again. The other ranks "
        f"ended {max(tally.ends_s):.1f} s after a kill at the latest; a rank waits {PEER_TIMEOUT_S:g} s for its peers. "
        f"End states are equal to the bit; those of islands within {max(tally.bounds):.2%} of the undisturbed loss."
    )
    return tally.kills, tally.harms, note
