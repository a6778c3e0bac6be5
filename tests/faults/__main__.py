"""Faults that laconic survives or notices, thousands of them, counted by the harm that they do.

    python -m tests.faults                            all campaigns, recorded
    python -m tests.faults --rows crash-states        some campaigns, recorded too
    python -m tests.faults --quick                    a small fixed sample of each, printed only

A campaign is a function under `campaign`. The suite runs a small fixed sample of the same code. Sections
of the record: `trust` has faults from outside, `device` what an accelerator would show, `mend` every member of a class
of defects that was mended, `publish` what befalls published weights, and `suite` ranks in one process beside processes.
"""

from __future__ import annotations

import sys

# They register the campaigns, in the order of the tables.
from tests.faults import (  # isort: skip  # noqa: F401
    device,
    crash_states,
    damage,
    recovery_damage,
    kills,
    links,
    membership,
    waits,
    disk,
    checks,
    fuzz,
    kept,
    ranks_differ,
    forged,
    parity,
    published,
)
from tests.faults.bench import BENCHMARK

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
