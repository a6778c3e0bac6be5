"""Random module trees under `fully_shard` against the unsharded models, on odd numbers of ranks and on islands, too.

tests/shard/random_trees draws the trees, has the oracle, and says how close sums in another order must come. The trees
nest units with checks, caches and precisions of their own. They have tied, frozen, scalar, empty and unused parameters,
buffers and several dtypes. Weights are edited between the steps, with notice and without. It needs hypothesis.
"""

from __future__ import annotations

import contextlib
import sys
import time

from tests.faults.bench import Bench, faults_row
from tests.shard.random_trees.explore import Findings, explore
from tests.shard.random_trees.pool import Pool
from tests.support.record import Row

_WORLDS = (2, 3, 4)
_NUM_TREES, _NUM_QUICK = 2000, 30
_BATCH = 50
"""The trees of one seed."""
_FIRST_SEED = 170_000


def row(bench: Bench) -> Row:
    """Try the trees, as many on each number of ranks."""
    num_trees, began = _NUM_QUICK if bench.quick else _NUM_TREES, time.monotonic()
    findings, by_world = Findings(), {}
    with contextlib.ExitStack() as stack:
        pools = {world: stack.enter_context(Pool(world)) for world in _WORLDS}
        for world, pool in pools.items():
            found = _try(pool, -(-num_trees // len(_WORLDS)))
            by_world[world] = found.num_valid
            findings.merge(found)
        seconds = time.monotonic() - began
        report = findings.report(pools)
    print(report, file=sys.stderr, flush=True)
    kinds = {kind: findings.kinds.get(kind, 0) for kind in ("differs", "foreign", "refused", "invalid")}
    parts = ", ".join(f"{number} on {world}" for world, number in by_world.items())
    refusals = "; ".join(each for each in findings.failures if each.startswith("refused"))
    return faults_row(
        key="module-trees",
        claim="random module trees: values and gradients of fully_shard against the unsharded model's",
        tried=sum(by_world.values()),
        at_least=num_trees,
        harms={"silent differences": kinds["differs"], "foreign tracebacks": kinds["foreign"]},
        note=f"{parts} ranks, in {seconds:.0f} s; {kinds['refused']} refused by name"
        f"{f' ({refusals})' if refusals else ''}; torch itself could not run {kinds['invalid']} more.",
    )


def _try(pool: Pool, share: int) -> Findings:
    found, seed = Findings(), _FIRST_SEED + 1000 * pool.world
    while found.num_valid < share:
        explore(pool, min(_BATCH, share - found.num_valid), seed, found)
        seed += 1
        print(f"  {pool.world} ranks: {found.kinds}", file=sys.stderr, flush=True)
    return found
