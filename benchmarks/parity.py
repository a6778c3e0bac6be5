"""Whether a sharded model does what the unsharded one does, on random module trees used at random.

    python -m benchmarks.parity            2,000 trees on 1, 2 and 4 ranks, recorded in RESULTS.md
    python -m benchmarks.parity --quick    60 trees, printed only

tests/shard/random_trees draws the trees and has the oracle. It needs hypothesis, which the `dev` extra brings. A tree
that fails is shrunk and printed.
"""

from __future__ import annotations

import contextlib
import sys
import time

from benchmarks.measure import Benchmark, Options
from benchmarks.record import Row
from tests.shard.random_trees.explore import Findings, explore
from tests.shard.random_trees.pool import Pool

_WORLDS = (1, 2, 4)
_NUM_TREES = 2000
_BATCH = 100
"""The trees of one seed."""


class Bench:
    """The findings of all trees, and the row that sums them up."""

    def __init__(self, num_trees: int) -> None:
        self.num_trees = num_trees
        self.findings = Findings()
        self.report = ""

    def trees(self) -> Row:
        """Try the trees, as many on each number of ranks."""
        began, by_world = time.monotonic(), {}
        with contextlib.ExitStack() as stack:
            pools = {world: stack.enter_context(Pool(world)) for world in _WORLDS}
            for world, pool in pools.items():
                found = self._try(pool)
                by_world[world] = found.num_valid
            seconds = time.monotonic() - began
            self.report = self.findings.report(pools)
        kinds = {kind: self.findings.kinds.get(kind, 0) for kind in ("differs", "foreign", "refused", "invalid")}
        refusals = "; ".join(each for each in self.findings.failures if each.startswith("refused"))
        parts = ", ".join(f"{number} on {world}" for world, number in by_world.items())
        return Row(
            key="trees",
            claim="random module trees, forward / backward / autograd.grad / step against the unsharded model",
            required=f">= {self.num_trees:,} trees, 0 differ, 0 foreign tracebacks",
            measured=f"{sum(by_world.values()):,} trees, {kinds['differs']} differ, {kinds['foreign']} foreign "
            f"tracebacks, {kinds['refused']} refused",
            is_met=sum(by_world.values()) >= self.num_trees and not kinds["differs"] and not kinds["foreign"],
            note=f"{parts} ranks, in {seconds:.0f} s; torch itself could not run {kinds['invalid']} more"
            + (f". Refusals: {refusals}." if refusals else "."),
        )

    def _try(self, pool: Pool) -> Findings:
        """Try a world's share of the trees."""
        share, found = -(-self.num_trees // len(_WORLDS)), Findings()
        first_seed = 1000 * pool.world
        while found.num_valid < share:
            explore(pool, min(_BATCH, share - found.num_valid), first_seed, found)
            first_seed += 1
            print(f"  {pool.world} ranks: {found.kinds}", file=sys.stderr, flush=True)
        self.findings.merge(found)
        return found


def _prepare(options: Options) -> contextlib.nullcontext[Bench]:
    return contextlib.nullcontext(Bench(60 if options.quick else _NUM_TREES))


BENCHMARK = Benchmark(
    name="parity",
    doc=__doc__,
    prepare=_prepare,
    rows={"trees": lambda bench: bench.trees()},
    details=lambda bench: bench.report,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
