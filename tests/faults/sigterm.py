"""A signal to islands that sync every hundred steps: they stop at once, and go on to the same bits.

Two islands train. At a call of a function of laconic some steps before or after the sync of step 100, one rank or both
get SIGTERM or SIGINT. All ranks must stop within two steps of the island that was furthest at that instant, and save.
The run then goes on to its end: the losses of all steps must be those of a run that nobody stopped, to the bit. Islands
sync all at once or fragment by fragment; in half of the runs one island is slower than the other.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.config import Config
from laconic.train.loop import Trainer, run
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.victims import TWO_NODES, Run, Strategy, at_call
from tests.support.launch import launch
from tests.support.record import Row

MOST_STEPS = 2
_STEPS, _FIRST, _STEP_S = 115, 94, 0.5
"""The steps of a run, the one from which calls count and steps are paced, and their least seconds."""
_CALLS_EACH = 1300  # between two signals: some half of a step
_RUNS, _QUICK_RUNS = 16, 2
_TIMEOUT_S = 600.0
_SYNC = {"mode": "local", "every": 100, "recovery": "$FOLDER/recovery"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "whole": _SYNC,
    "streamed": {**_SYNC, "fragments": 2, "overlap": 4, "codec": "int4", "error_feedback": True},
}


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal, and the instant at which ranks send it to themselves."""

    number: signal.Signals
    ranks: tuple[int, ...]
    call: int
    """The call of a function of laconic, from the beginning of step `_FIRST`."""
    paces_s: tuple[float, float]
    """The least seconds of a step from that one on, by rank."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What one rank did."""

    begun_s: list[float]
    """The times at which it began its steps."""
    signalled_s: list[float]
    stopped: dict[str, Any]
    """The summary of the run that was stopped."""


def train_until(config: Config, given: Signal) -> Stop:
    """Train until the signal. On every rank."""
    rank, begun_s, signalled_s, step = int(os.environ["RANK"]), list[float](), list[float](), Trainer._step

    def strike() -> None:
        signalled_s.append(time.time())
        os.kill(os.getpid(), given.number)

    def watched(self: Trainer, number: int) -> Any:
        begun_s.append(time.time())
        if number == _FIRST and rank in given.ranks:
            at_call(given.call, strike)
        result = step(self, number)
        if number >= _FIRST:
            time.sleep(max(0.0, begun_s[-1] + given.paces_s[rank] - time.time()))
        return result

    Trainer._step = watched  # type: ignore[assignment, method-assign]
    try:
        return Stop(begun_s=begun_s, signalled_s=signalled_s, stopped=run(config))
    finally:
        Trainer._step = step  # type: ignore[method-assign]
        sys.setprofile(None)


@dataclass(kw_only=True)
class Counts:
    """The harm that signals did."""

    tried: int = 0
    late: int = 0
    apart: int = 0
    """Runs whose ranks did not stop at one step."""
    differing: int = 0
    most_steps: int = 0

    def add(self, stops: list[Stop], resumed: dict[str, Any], unbroken: list[float]) -> None:
        """Count one run, from what its ranks did, the summary of its rest, and the losses of one without a stop."""
        self.tried += 1
        at = min(at for stop in stops for at in stop.signalled_s)
        furthest = max(bisect_right(stop.begun_s, at) for stop in stops)
        ends = {resumed["start_step"], *(len(stop.stopped["losses"]) for stop in stops)}
        self.most_steps = max(self.most_steps, max(ends) - furthest)
        self.late += max(ends) - furthest > MOST_STEPS or any(stop.stopped["stopped_by"] is None for stop in stops)
        self.apart += len(ends) > 1
        self.differing += stops[0].stopped["losses"] + resumed["losses"] != unbroken


def campaign(folder: Path, num: int) -> Counts:
    """Stop `num` runs by signals, and let them go on."""
    counts = Counts()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"num_ranks": 2, "num_local": 1, "timeout_s": _TIMEOUT_S}
    unbroken = {kind: launch(run, _config(KINDS[kind], folder / kind), **options)[0] for kind in list(KINDS)[:num]}
    for number in range(num):
        kind = list(KINDS)[number % len(KINDS)]
        given = Signal(
            number=(signal.SIGTERM, signal.SIGINT)[number // 4 % 2],
            ranks=((0,), (1,), (0, 1))[number % 3],
            call=1 + _CALLS_EACH * number,
            paces_s=(_STEP_S, _STEP_S * (1.5 if number // 2 % 2 else 1.0)),
        )
        config = _config(KINDS[kind], folder / f"run-{number}")
        stops = launch(train_until, config, given, **options, backend=None)
        resumed = launch(run, config, **options, backend=None)[0]
        counts.add(stops, resumed, unbroken[kind]["losses"])
        print(f"  sigterm {number}: {kind}, {given}; {counts}", file=sys.stderr, flush=True)
    return counts


def _config(sync: Mapping[str, Any], folder: Path) -> Config:
    """A job in a new folder."""
    options = {"steps": _STEPS, "save_every": 0, "eval_every": 0, "log_every": 100, "resume": "auto"}
    return Run(Strategy(sections={"sync": sync}, place=TWO_NODES), folder, timeout_s=_TIMEOUT_S, **options).config


@campaign_row("sigterm", section="mend")
def row(bench: Bench) -> Row:
    """Stop runs of islands by signals."""
    counts = campaign(bench.out / "sigterm", _QUICK_RUNS if bench.quick else _RUNS)
    return faults_row(
        claim="SIGTERM under islands at `every=100`",
        tried=counts.tried,
        at_least=_QUICK_RUNS if bench.quick else _RUNS,
        harms={
            f"runs that stop more than {MOST_STEPS} steps later": counts.late,
            "runs whose ranks stop at different steps": counts.apart,
            "runs that do not go on to the bits of a run that was not stopped": counts.differing,
        },
        note=(
            "Two islands, whole or streamed; SIGTERM or SIGINT to one rank or both, at calls of laconic's functions "
            f"that are spread over the steps from {_FIRST} on; steps of {_STEP_S:g} s, and in half of the runs half as "
            f"long again on one island. They stopped at most {counts.most_steps} steps after the step in which the "
            "furthest was. An island that is far behind catches up first; if that takes longer than torchrun waits "
            "(30 s), the run ends as by a kill."
        ),
    )
