"""Faults that laconic survives or notices: thousands of them, counted by the harm that they do.

    python -m tests.faults                            all campaigns, recorded in RESULTS.md
    python -m tests.faults --rows crash-states        some campaigns, recorded too
    python -m tests.faults --quick                    a small fixed sample of each, printed only

A campaign is one module. The tests run a small fixed sample of the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from tests.faults import (
    bit_flips,
    check_cost,
    checkpoint_damage,
    cluster_fuzz,
    config_fuzz,
    crash_states,
    disk,
    elsewhere,
    job_damage,
    kills,
    links,
    membership,
    module_trees,
    pickle_audit,
    prepare_fuzz,
    races,
    recovery_damage,
    waits,
)
from tests.faults.bench import Bench, open_bench
from tests.support.measure import Benchmark
from tests.support.record import Row

CAMPAIGNS: Mapping[str, Callable[[Bench], Row]] = {
    # in the order of the table; most campaigns are the function `row` of their module
    "races": races.races,
    "stream-waits": races.waits,
    "orders": races.orders,
    "crash-states": crash_states.row,
    "crash-states-elsewhere": elsewhere.row,
    "checkpoint-damage": checkpoint_damage.row,
    "recovery-damage": recovery_damage.row,
    "job-damage": job_damage.row,
    "kills": kills.row,
    "links": links.row,
    "island-dies": membership.dies,
    "island-comes": membership.comes,
    "waits": waits.row,
    "disk": disk.row,
    "bit-flips": bit_flips.row,
    "check-cost": check_cost.row,
    "config-fuzz": config_fuzz.row,
    "prepare-fuzz": prepare_fuzz.row,
    "cluster-fuzz": cluster_fuzz.row,
    "module-trees": module_trees.row,
    "pickles": pickle_audit.row,
}

BENCHMARK = Benchmark(name="trust", module="tests.faults", doc=__doc__, prepare=open_bench, rows=CAMPAIGNS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
