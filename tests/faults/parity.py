"""Whether a sharded model does what the unsharded one does, and holds no more than FSDP2's users expect.

    python -m tests.faults.parity                        all rows, with 2,000 trees, recorded in RESULTS.md
    python -m tests.faults.parity --rows groups,forwards some rows, recorded too
    python -m tests.faults.parity --quick                all rows, with 60 trees, printed only

tests/shard/random_trees draws the trees and has the oracle. It needs hypothesis, which the `dev` extra brings. A tree
that fails is shrunk and printed.
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch.distributed as dist
from torch import nn

from tests.shard.random_trees.explore import Findings, explore
from tests.shard.random_trees.pool import Pool
from tests.shard.test_autograd import job_several_forwards
from tests.support.launch import launch
from tests.support.measure import Benchmark, Options
from tests.support.record import Row

_WORLDS = (1, 2, 4)
_NUM_TREES = 2000
_BATCH = 100
"""The trees of one seed."""
_CALLS = 30
_TIMEOUT_S = 120.0


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


def count_groups() -> tuple[int, int, int, int]:
    """Return the process groups of this rank: before any call, after one, after `_CALLS`, and those FSDP2 then adds."""
    from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

    from laconic import fully_shard

    def count() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = count()
    fully_shard(nn.Linear(3, 2))
    after_one = count()
    for _ in range(_CALLS - 1):
        fully_shard(nn.Linear(3, 2))
    after_all = count()
    for _ in range(_CALLS):
        fully_shard_of_torch(nn.Linear(3, 2))
    return before, after_one, after_all, count() - after_all


def groups(bench: Bench) -> Row:
    """Count process groups."""
    counts = set(launch(count_groups, num_ranks=4, num_local=2, timeout_s=_TIMEOUT_S))
    before, one, many, of_fsdp2 = max(counts)
    return Row(
        key="groups",
        claim=f"process groups after {_CALLS} calls of fully_shard without mesh=, against 1 call",
        required="equal",
        measured=f"{many} against {one}",
        is_met=len(counts) == 1 and many == one,
        note=(
            f"2 nodes x 2 ranks on Gloo; {before} before the first call. FSDP2's own {_CALLS} calls add {of_fsdp2}. "
            "tests/comm/test_cluster.py also counts slices of meshes that are made anew."
        ),
    )


def forwards(bench: Bench) -> Row:
    """Compare peaks of several forwards before one backward with those of as many, each with its own backward."""

    def peak(number: int, order: str) -> int:
        by_rank = launch(job_several_forwards, number, order, num_ranks=2, num_local=1, timeout_s=_TIMEOUT_S)
        return max(peak_bytes for peak_bytes, _ in by_rank)

    two, three = (peak(number, "together") / peak(number, "one by one") for number in (2, 3))
    single, summed, once = peak(1, "one by one"), peak(2, "one by one"), peak(3, "reduced once")
    return Row(
        key="forwards",
        claim="peak memory, two and three forwards before one backward, against one at a time",
        required="+ activations only",
        measured=f"{two:.3f}x and {three:.3f}x without activations",
        is_met=two <= 1 and three <= 1,
        note=(
            "the engine's own count, which has no activations, against as many forwards that each have their own "
            "backward, in the second step, on 2 nodes x 1 rank, with 5 blocks that are much larger than their "
            f"activations. That takes {summed / 1e6:.2f} MB a rank, and a single forward and backward "
            f"{single / 1e6:.2f} MB: whoever sums gradients has this rank's parts of the earlier ones, too. The "
            "gradients equal those of the unsharded model. With set_reduce_once_per_backward() three forwards take "
            f"{once / summed:.2f}x: fewer bytes cross the wire, and gradients stay whole until the end."
        ),
    )


def _prepare(options: Options) -> contextlib.nullcontext[Bench]:
    return contextlib.nullcontext(Bench(60 if options.quick else _NUM_TREES))


BENCHMARK = Benchmark(
    name="parity",
    module="tests.faults.parity",
    doc=__doc__,
    prepare=_prepare,
    rows={"trees": lambda bench: bench.trees(), "groups": groups, "forwards": forwards},
    details=lambda bench: bench.report,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
