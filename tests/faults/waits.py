"""Ranks in library use that lose another rank: none of them waits longer than the groups' timeout allows.

Four ranks train, save or agree. At a random instant one is killed (SIGKILL), stopped for good (SIGSTOP) or loops in
code of its own. All others must end by themselves, within the timeout of the groups and the seconds of grace that
`laconic.comm.failure` gives. After a SIGKILL each of them must name the lost rank.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import waiters
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support import launch
from tests.support.record import Row

NUM_RANKS = 4
TIMEOUTS_S = {"kill": 60.0, "stop": 6.0, "loop": 6.0}
"""The timeout of the groups. After a kill the others must not need it."""
GRACE_S = 2.0
_SLACK_S = 40.0  # for four processes to run on a busy machine; less than the timeout that a kill must not need
_START_S = 90.0
KINDS = ("kill", "stop", "loop")
_KILLS, _QUICK_KILLS = 210, 7
_AT_ONCE, _MOST_STARTS = 3, 5


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The behaviour of the other ranks after one rank was lost."""

    strategy: str
    kind: str
    rank: int
    hanging: tuple[int, ...]
    """The ranks that had not ended by themselves."""
    silent: tuple[int, ...]
    """The ranks that a kill ended without the name of the lost rank."""
    exit_codes: tuple[int | None, ...]
    """Of all ranks, in order; None for a rank that did not end."""
    wall_s: float
    """The seconds until the last rank ended."""
    printed: str


def lose(strategy: str, kind: str, rank: int, delay_s: float, cause_s: float | None = None) -> Loss:
    """Start ranks, lose one `delay_s` seconds after all have taken steps, and wait for the others.

    A rank whose transfer fails waits `cause_s` seconds for the name of the lost rank; by default as long as in a job.
    """
    launch._context.set_forkserver_preload([*launch.PRELOADED, "tests.support.fork_server"])
    port = launch.free_port()
    with tempfile.TemporaryDirectory(prefix="laconic-waits-") as folder:
        processes: list[Any] = []
        loops = rank if kind == "loop" else -1
        try:
            for each in range(NUM_RANKS):
                environment = launch.torchrun_environment(each, NUM_RANKS, NUM_RANKS, port)
                job = (strategy, folder, environment, TIMEOUTS_S[kind], GRACE_S, loops, cause_s)
                processes.append(launch._context.Process(target=waiters.live, args=job, daemon=True))
                processes[-1].start()
            _wait_for_steps(processes, Path(folder))
            time.sleep(delay_s)
            begun = time.monotonic()
            if kind != "loop":
                os.kill(processes[rank].pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            others = [each for each in range(NUM_RANKS) if each != rank or kind == "loop"]
            deadline = begun + (0 if kind == "kill" else TIMEOUTS_S[kind]) + GRACE_S + _SLACK_S
            for each in others:
                processes[each].join(max(0.0, deadline - time.monotonic()))
            wall_s = time.monotonic() - begun
            exit_codes = tuple(process.exitcode for process in processes)
            hanging = tuple(each for each in others if processes[each].exitcode is None)
            texts = {each: Path(folder, f"err-{each}").read_text() for each in others}
            silent = tuple(each for each in others if kind == "kill" and f"rank {rank} is gone" not in texts[each])
        finally:
            for process in processes:
                process.kill()
                process.join()
    printed = "\n".join(f"--- rank {each}\n{text[-20_000:]}" for each, text in texts.items())
    return Loss(
        strategy=strategy, kind=kind, rank=rank, hanging=hanging, silent=silent, exit_codes=exit_codes, wall_s=wall_s,
        printed=printed,
    )  # fmt: skip


def _wait_for_steps(processes: list[Any], folder: Path) -> None:
    """Wait until all ranks have taken their first steps."""
    deadline = time.monotonic() + _START_S
    while not all((folder / f"rank-{each}").exists() for each in range(NUM_RANKS)):
        if time.monotonic() > deadline or any(process.exitcode for process in processes):
            texts = [path.read_text() for path in sorted(folder.glob("err-*"))]
            raise RuntimeError("the ranks did not start:\n" + "\n".join(texts))
        time.sleep(0.02)


def lose_one(chosen: tuple[str, str, int, float], cause_s: float | None = None) -> Loss:
    """Lose a rank, see `lose`; start again if another program has taken the port meanwhile."""
    for _ in range(_MOST_STARTS):
        try:
            return lose(*chosen, cause_s)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
    raise RuntimeError(f"no port stayed free in {_MOST_STARTS} starts")


@campaign_row("waits")
def row(bench: Bench) -> Row:
    """Lose ranks of all strategies in all ways."""
    dice, chosen = random.Random(17), []
    for number in range(_QUICK_KILLS if bench.quick else _KILLS):
        strategy = list(waiters.STRATEGIES)[number % len(waiters.STRATEGIES)]
        kind = KINDS[number // len(waiters.STRATEGIES) % len(KINDS)]
        chosen.append((strategy, kind, dice.randrange(NUM_RANKS), dice.random()))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        losses = list(pool.map(lose_one, chosen))
    for loss in losses:
        if loss.hanging or loss.silent:
            print(loss, loss.printed, flush=True)
    longest = max(loss.wall_s for loss in losses)
    return faults_row(
        claim="ranks in library use that lose another rank (SIGKILL, SIGSTOP, an endless loop), all strategies",
        tried=len(losses),
        at_least=_KILLS,
        harms={
            "hang beyond the timeout": sum(bool(loss.hanging) for loss in losses),
            "do not name the rank that was killed": sum(bool(loss.silent) for loss in losses),
        },
        note=f"Four ranks; the groups' timeout is {TIMEOUTS_S['stop']:g} s, but 60 s where ranks are killed: there the "
        f"others must not need it; grace {GRACE_S:g} s. The longest took {longest:.1f} s.",
    )
