"""A signal to islands that sync every hundred steps: they stop at once, and go on to the same bits.

Two islands train. At a random instant, six steps before a sync or later, one rank or both get SIGTERM or SIGINT. All
ranks must stop within two steps of the island that was furthest at that instant, and save. The run then goes on to its
end: the losses of all steps must be those of a run that nobody stopped, to the bit. Islands sync all at once or
fragment by fragment; in half of the runs one island is slower than the other.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.config import Config, load
from laconic.train.loop import Trainer, run
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.runs import Run, Strategy
from tests.faults.victims import Place
from tests.support.launch import launch
from tests.support.record import Row

MOST_STEPS = 2
_STEPS, _STEP_S = 115, 0.5
_FIRST = 94
"""The step after which the steps are paced and the signal comes, before or after the sync of step 100."""
_RUNS, _QUICK_RUNS = 16, 2
_TIMEOUT_S = 600.0
_SYNC = {"mode": "local", "every": 100, "recovery": "$FOLDER/recovery"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "whole": _SYNC,
    "streamed": {**_SYNC, "fragments": 2, "overlap": 4, "codec": "int4", "error_feedback": True},
}
_PLACE = Place(num_ranks=2, num_local=1)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal, and the pace of the islands that get it."""

    number: signal.Signals
    ranks: tuple[int, ...]
    after_s: float
    """The seconds after the first paced step."""
    paces_s: tuple[float, float]
    """The least seconds of a paced step, by rank."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What one rank did."""

    begun_s: list[float]
    """The times at which it began its steps."""
    signalled_s: float | None
    ended_s: float
    stopped: dict[str, Any]
    """The summary of the run that was stopped."""


def train_until(config: Config, given: Signal) -> Stop:
    """Train until the signal. On every rank."""
    rank, begun_s, signalled = int(os.environ["RANK"]), [], []
    step = Trainer._step

    def paced(self: Trainer, number: int) -> Any:
        begun_s.append(time.time())
        if number == _FIRST and rank in given.ranks:
            threading.Timer(given.after_s, strike).start()
        result = step(self, number)
        if number >= _FIRST:
            time.sleep(max(0.0, begun_s[-1] + given.paces_s[rank] - time.time()))
        return result

    def strike() -> None:
        signalled.append(time.time())
        os.kill(os.getpid(), given.number)

    Trainer._step = paced  # type: ignore[assignment, method-assign]
    try:
        stopped = run(config)
    finally:
        Trainer._step = step  # type: ignore[method-assign]
    ended_s = time.time()
    signalled_s = signalled[0] if signalled else None
    return Stop(begun_s=begun_s, signalled_s=signalled_s, ended_s=ended_s, stopped=stopped)


@dataclass(kw_only=True)
class Counts:
    """The harm that signals did."""

    tried: int = 0
    late: int = 0
    apart: int = 0
    """Runs whose ranks did not stop at one step."""
    differing: int = 0
    slowest_s: float = 0.0
    most_steps: int = 0

    def add(self, stops: list[Stop], resumed: dict[str, Any], unbroken: list[float]) -> None:
        """Count one run, from what its ranks did, the summary of its rest, and the losses of one without a stop."""
        self.tried += 1
        at = min(stop.signalled_s for stop in stops if stop.signalled_s is not None)
        furthest = max(bisect_right(stop.begun_s, at) for stop in stops)
        ends = {resumed["start_step"], *(len(stop.stopped["losses"]) for stop in stops)}
        steps = max(ends) - furthest
        self.most_steps = max(self.most_steps, steps)
        self.slowest_s = max(self.slowest_s, *(stop.ended_s - at for stop in stops))
        self.late += steps > MOST_STEPS or any(stop.stopped["stopped_by"] is None for stop in stops)
        self.apart += len(ends) > 1
        self.differing += stops[0].stopped["losses"] + resumed["losses"] != unbroken


def campaign(folder: Path, num: int, *, seed: int = 0) -> Counts:
    """Stop `num` runs by signals, and let them go on."""
    chance, counts = random.Random(seed), Counts()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unbroken = {}
    for kind, sync in KINDS.items():
        unbroken[kind] = launch(run, _config(sync, folder / kind), num_ranks=2, num_local=1, timeout_s=_TIMEOUT_S)[0]
    for number in range(num):
        kind, is_even = list(KINDS)[number % len(KINDS)], number // len(KINDS) % 2 == 0
        given = Signal(
            number=chance.choice([signal.SIGTERM, signal.SIGINT]),
            ranks=chance.choice([(0,), (1,), (0, 1)]),
            after_s=chance.uniform(0, 12 * _STEP_S),
            paces_s=(_STEP_S, _STEP_S if is_even else 1.5 * _STEP_S),
        )
        config = _config(KINDS[kind], folder / f"run-{number}")
        stops = launch(train_until, config, given, num_ranks=2, num_local=1, timeout_s=_TIMEOUT_S, backend=None)
        resumed = launch(run, config, num_ranks=2, num_local=1, timeout_s=_TIMEOUT_S, backend=None)[0]
        counts.add(stops, resumed, unbroken[kind]["losses"])
        print(f"  sigterm {number}: {kind}, {given}; {counts}", file=sys.stderr, flush=True)
    return counts


def _config(sync: Mapping[str, Any], folder: Path) -> Config:
    """A job in a new folder."""
    made = Run(Strategy(sections={"sync": sync}, place=_PLACE), folder)
    config = load(Path(made.arguments[0]))
    train = replace(
        config.train, steps=_STEPS, save_every=0, eval_every=0, log_every=100, resume="auto", timeout_s=_TIMEOUT_S
    )
    return replace(config, train=train)


@campaign_row("sigterm", section="mend")
def row(bench: Bench) -> Row:
    """Stop runs of islands by signals."""
    counts = campaign(bench.out / "sigterm", _QUICK_RUNS if bench.quick else _RUNS)
    return faults_row(
        claim="SIGTERM under islands at `every=100`",
        tried=counts.tried,
        at_least=_RUNS,
        harms={
            f"runs that stop more than {MOST_STEPS} steps later": counts.late,
            "runs whose ranks stop at different steps": counts.apart,
            "runs that do not go on to the bits of a run that was not stopped": counts.differing,
        },
        note=(
            "Two islands, whole or streamed; SIGTERM or SIGINT to one rank or both, at a random instant; steps of "
            f"{_STEP_S:g} s, and in half of the runs half as long again on one island. They stopped at most "
            f"{counts.most_steps} steps after the step in which the furthest was, and had saved {counts.slowest_s:.1f} "
            "s after the signal at the latest. An island that is far behind catches up first; if that takes longer "
            "than torchrun waits (30 s), the run ends as by a kill."
        ),
    )
