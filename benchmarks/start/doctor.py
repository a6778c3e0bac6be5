"""The row `doctor`: each of six faults planted alone on one of two nodes, and healthy runs of the same lab."""

from __future__ import annotations

import sys

from tests.support.measure import Options
from tests.support.planted import examine, open_lab
from tests.support.record import Row

FAULTS = {
    "small memlock": ("memlock", "memlock"),
    "skewed clock": ("clock", "clock"), "mixed versions": ("versions", "versions"),
    "wrong interface": ("loopback", "interface"), "one slow node": ("slow-node", "slow-node"),
    "slow link": ("slow-link", "slow-link"),
}  # fmt: skip
"""Each planted fault, and the kind of the finding that names it. The slow link is last: the lab keeps its filter."""
_HEALTHY_RUNS = 8


def row(options: Options) -> Row:
    """Count the faults found, and the findings that no fault explains."""
    missed, alarms = [], []
    faults, num_healthy = ({}, 1) if options.quick else (FAULTS, _HEALTHY_RUNS)
    with open_lab() as lab:
        for _ in range(num_healthy):
            code, _, found = examine(lab)
            alarms += [f"{kind} in a healthy lab" for kind in found] or (["an exit code"] if code else [])
        for fault, (planted, kind) in faults.items():
            code, _, found = examine(lab, planted)
            print(f"  {fault}: {', '.join(found)}", file=sys.stderr, flush=True)
            if kind not in found or code != 1:
                missed.append(fault)
            alarms += [f"{other} beside {fault}" for other in found if other != kind]
    return Row(
        claim="planted faults that `laconic doctor` finds / false alarms",
        required=f"{len(faults)} of {len(faults)} / 0",
        measured=f"{len(faults) - len(missed)} of {len(faults)} / {len(alarms)}",
        is_met=not missed and not alarms,
        note=f"{num_healthy} runs without a fault; then each alone on node 1 of 2, at 200 Mbit/s: {', '.join(faults)}."
        + "".join(f" Missed: {fault}." for fault in missed)
        + "".join(f" False alarm: {alarm}." for alarm in alarms),
    )
