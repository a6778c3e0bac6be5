"""Links that are cut while a run trains over them, for moments and for longer than a rank waits.

A moment without a link delays the run, and changes nothing: TCP sends again. A longer one ends the run on all nodes
within the timeout, and the run that is started again ends equal to the bit.

`python -m tests.faults.links` is a rank of `laconic train` in the lab: the first rank of the last node takes its node's
link down as it begins a step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.lab import Lab, LabUnavailable, RunResult
from tests.faults.bench import Bench, Found, campaign
from tests.faults.kills import HARMS, Tally
from tests.faults.victims import LIMIT_S, PEER_TIMEOUT_S, STEPS, STRATEGIES, Run
from tests.support.measure import BenchmarkError

NAMES = ("cache host", "4bit", "islands, streamed", "cyclic")
CUTS_S = (0.2, 1.5, 2.7, 4.0, PEER_TIMEOUT_S + 10, PEER_TIMEOUT_S + 15)
"""The cuts of each strategy: shorter than a rank waits, and longer."""
_START_S = 60.0  # the time for all processes to start


@campaign(
    "links",
    "links of a node that are cut and come back, in the lab",
    harms=HARMS,
)
def links(bench: Bench) -> Found:
    """Cut links in the lab."""
    tally, names = Tally(), NAMES[:1] if bench.quick else NAMES
    try:
        with Lab(nodes=2) as lab:
            for name in names:
                folder = bench.out / "links" / name.replace(", ", "-")
                _cut_under(lab, name, CUTS_S[1::3] if bench.quick else CUTS_S, folder, tally)
    except LabUnavailable as error:
        raise BenchmarkError(str(error)) from None
    note = (
        f"2 nodes under {', '.join(names)}, cut at the beginning of a step for {CUTS_S} s; a rank waits "
        f"{PEER_TIMEOUT_S:g} s. End states are equal to the bit to those of runs whose link stays; those of islands "
        f"within {max(tally.bounds, default=0):.2%} of the eval loss."
    )
    return tally.kills, tally.harms, note


def _cut_under(lab: Lab, name: str, cuts_s: Sequence[float], folder: Path, tally: Tally) -> None:
    strategy = STRATEGIES[name]
    folder.mkdir(parents=True)
    whole = Run(strategy, folder / "undisturbed")
    _train(lab, whole, 0, 0)
    expected = whole.end_state()
    for number, cut_s in enumerate(cuts_s):
        where, run = f"{name}, cut {number}", Run(strategy, folder / f"run-{number}")
        tally.kills += 1
        result = _train(lab, run, 1 + 2 * number % STEPS, cut_s)
        if result.timed_out:
            tally.harms.append(f"hang: {where}: after {result.wall_s:.0f} s")
        if result.exit_code and (again := _train(lab, run, 0, 0)).exit_code:
            tally.harms.append(f"restart that failed: {where}: exit code {again.exit_code}")
            continue
        tally.compare(run.end_state(), expected, where, is_exact=strategy.is_exact)


def _train(lab: Lab, run: Run, step: int, cut_s: float) -> RunResult:
    up = [sys.executable, "-m", "tests.faults.links", "up"]  # the last cut may have outlived its rank
    lab.execute([up] * lab.nodes, show=False)
    script = ["-m", "tests.faults.links", str(step), str(cut_s), *run.arguments]
    result = lab.run(script, timeout_s=_START_S + LIMIT_S + cut_s, show=False)
    (run.folder / "lab.txt").write_text("\n---\n".join(node.output for node in result.nodes))
    return result


# -- on a node ---------------------------------------------------------------------------------------------------------


def _set_link(state: str) -> None:
    """Take the link of this node "up" or "down"."""
    from pyroute2 import IPRoute

    from laconic.lab.wire import INTERFACE

    with IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=INTERFACE)[0], state=state)


def _be_rank(cut_at: int, cut_s: float, arguments: list[str]) -> int:
    """Train, and cut the link as step `cut_at` begins, for so many seconds or until this rank ends; never at 0."""
    from laconic.train.cli import command
    from laconic.train.loop import Trainer

    is_last_node = int(os.environ["GROUP_RANK"]) == int(os.environ["GROUP_WORLD_SIZE"]) - 1
    cuts, step = is_last_node and os.environ["LOCAL_RANK"] == "0", Trainer._step

    def repair() -> None:
        time.sleep(cut_s)
        _set_link("up")

    def cutting(self: Trainer, number: int) -> Any:
        if cuts and number + 1 == cut_at:
            _set_link("down")
            print(f"the link is cut for {cut_s:.1f} s", file=sys.stderr, flush=True)
            threading.Thread(target=repair, daemon=True).start()
        return step(self, number)

    Trainer._step = cutting  # type: ignore[assignment, method-assign]
    return command(arguments)


if __name__ == "__main__":
    if sys.argv[1:] == ["up"]:
        _set_link("up")
    else:
        sys.exit(_be_rank(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
