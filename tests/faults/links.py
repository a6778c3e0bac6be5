"""Links that are cut while a run trains over them, for moments and for longer than a rank waits.

A moment without a link delays the run, and changes nothing: TCP sends again. A longer one ends the run on all nodes
within the timeout, and the run that is started again ends equal to the bit.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from laconic.lab import Lab, LabUnavailable, RunResult
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.kills import Tally
from tests.faults.runs import LIMIT_S, PEER_TIMEOUT_S, STRATEGIES, Run
from tests.support.measure import BenchmarkError
from tests.support.record import Row

NAMES = ("cache host", "4bit", "islands, streamed", "cyclic")
SHORT_S, LONG_S = (0.2, 4.0), (PEER_TIMEOUT_S + 10, PEER_TIMEOUT_S + 15)
NUM_SHORT, NUM_LONG = 4, 2
"""The cuts of each strategy: shorter than a rank waits, and longer."""
_START_S = 60.0  # the time for all processes to start


@campaign_row("links")
def row(bench: Bench) -> Row:
    """Cut links in the lab."""
    tally = Tally()
    try:
        with Lab(nodes=2) as lab:
            for index, name in enumerate(NAMES[:1] if bench.quick else NAMES):
                _cut_under(lab, name, bench, random.Random(index), tally)
    except LabUnavailable as error:
        raise BenchmarkError(str(error)) from None
    for problem in (*tally.hangs, *tally.differing, *tally.failed):
        print(problem, file=sys.stderr, flush=True)
    harms = {
        "hangs": len(tally.hangs), "end states that differ": len(tally.differing),
        "restarts that failed": len(tally.failed),
    }  # fmt: skip
    return faults_row(
        claim="links of a node that are cut and come back, in the lab",
        tried=tally.kills,
        at_least=len(NAMES) * (NUM_SHORT + NUM_LONG),
        harms=harms,
        note=(
            f"2 nodes under {', '.join(NAMES)}. A cut of {SHORT_S[0]:g} to {SHORT_S[1]:g} s delays a run; one of more "
            f"than the {PEER_TIMEOUT_S:g} s that a rank waits ends it on both nodes, and it is started again. End "
            "states are equal to the bit to those of runs whose link stays; those of islands within "
            f"{tally.bound:.2%} of the eval loss."
        ),
    )


def _cut_under(lab: Lab, name: str, bench: Bench, chance: random.Random, tally: Tally) -> None:
    strategy, folder = STRATEGIES[name], bench.out / "links" / name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True)
    whole = Run(strategy, folder / "undisturbed")
    span_s = _train(lab, whole, 0, 0).wall_s
    expected = whole.end_state()
    lengths = [SHORT_S] * (1 if bench.quick else NUM_SHORT) + [LONG_S] * (1 if bench.quick else NUM_LONG)
    for number, (least_s, most_s) in enumerate(lengths):
        where, run = f"{name}, cut {number}", Run(strategy, folder / f"run-{number}")
        tally.kills += 1
        # The thread that cuts begins after the imports, which take the larger part of so short a run.
        result = _train(lab, run, chance.uniform(0.1, span_s / 3), chance.uniform(least_s, most_s))
        if result.timed_out:
            tally.hangs.append(f"{where}: after {result.wall_s:.0f} s")
        if result.exit_code and (again := _train(lab, run, 0, 0)).exit_code:
            tally.failed.append(f"{where}: exit code {again.exit_code}")
            continue
        tally.compare(run.end_state(), expected, where, is_exact=strategy.is_exact)
    print(f"  {name}: {len(lengths)} cuts, {len(tally.differing)} differing so far", file=sys.stderr, flush=True)


def _train(lab: Lab, run: Run, cut_after_s: float, cut_for_s: float) -> RunResult:
    up = [sys.executable, "-m", "tests.faults.cut_rank", "up"]  # the last cut may have outlived its rank
    lab.execute([up] * lab.nodes, show=False)
    script = ["-m", "tests.faults.cut_rank", str(cut_after_s), str(cut_for_s), *run.arguments]
    result = lab.run(script, timeout_s=_START_S + LIMIT_S + cut_for_s, show=False)
    _keep_output(run.folder, result)
    return result


def _keep_output(folder: Path, result: RunResult) -> None:
    with (folder / "lab.txt").open("a") as file:
        for node in result.nodes:
            file.write(f"--- node, exit code {node.exit_code}\n{node.output}\n")
