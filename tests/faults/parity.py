"""Whether a sharded model does what the unsharded one does, and holds no more than FSDP2's users expect.

tests/shard/random_trees draws the trees, has the oracle, and says how close sums in another order must come. The trees
nest units with checks, caches and precisions of their own. They have tied, frozen, scalar, empty and unused parameters,
buffers and several dtypes. Weights are edited between the steps, with notice and without. A tree that fails is shrunk
and printed. It needs hypothesis, which the `dev` extra brings.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from torch import nn

from laconic import rehearse
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.shard.random_trees.explore import Findings, explore
from tests.shard.random_trees.pool import Pool
from tests.support import sharded_net
from tests.support.record import Row

_NUM_TREES = 2000
_CALLS = 30


@campaign_row("trees", section="parity")
def trees(bench: Bench) -> Row:
    """Random module trees on even numbers of ranks."""
    findings, num_trees, account = _try_trees(bench, (1, 2, 4), quick=60, batch=100, first_seed=0)
    return faults_row(
        claim="random module trees, forward / backward / autograd.grad / step against the unsharded model",
        tried=num_trees,
        at_least=60 if bench.quick else _NUM_TREES,
        harms={"differ": findings.kinds.get("differs", 0), "foreign tracebacks": findings.kinds.get("foreign", 0)},
        note=account,
    )


@campaign_row("module-trees")
def module_trees(bench: Bench) -> Row:
    """Random module trees on odd numbers of ranks and on islands, too."""
    findings, num_trees, account = _try_trees(bench, (2, 3, 4), quick=30, batch=50, first_seed=170_000)
    return faults_row(
        claim="random module trees: values and gradients of fully_shard against the unsharded model's",
        tried=num_trees,
        at_least=30 if bench.quick else _NUM_TREES,
        harms={
            "silent differences": findings.kinds.get("differs", 0),
            "foreign tracebacks": findings.kinds.get("foreign", 0),
        },
        note=account,
    )


def _try_trees(
    bench: Bench, worlds: tuple[int, ...], *, quick: int, batch: int, first_seed: int
) -> tuple[Findings, int, str]:
    """Try trees, as many on each number of ranks; return the findings, the number of trees, and an account of them.

    A seed draws `batch` trees. Trees that torch itself cannot run do not count.
    """
    began, by_world, findings = time.monotonic(), {}, Findings()
    share = -(-(quick if bench.quick else _NUM_TREES) // len(worlds))
    pools = {world: Pool(world) for world in worlds}
    for world, pool in pools.items():
        found, seed = Findings(), first_seed + 1000 * world
        while found.num_valid < share:
            explore(pool, min(batch, share - found.num_valid), seed, found)
            seed += 1
            print(f"  {world} ranks: {found.kinds}", file=sys.stderr, flush=True)
        by_world[world] = found.num_valid
        findings.merge(found)
    seconds = time.monotonic() - began
    print(findings.report(pools), file=sys.stderr, flush=True)
    parts = ", ".join(f"{number} on {world}" for world, number in by_world.items())
    refusals = "; ".join(each for each in findings.failures if each.startswith("refused"))
    account = (
        f"{parts} ranks, in {seconds:.0f} s; {findings.kinds.get('refused', 0)} refused by name"
        f"{f' ({refusals})' if refusals else ''}; torch itself could not run {findings.kinds.get('invalid', 0)} more."
    )
    return findings, sum(by_world.values()), account


def count_groups() -> tuple[int, int, int, int]:
    """Return the process groups of this rank: before any call, after one, after `_CALLS`, and those FSDP2 then adds."""
    from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

    from laconic import fully_shard

    dist.init_process_group("gloo")

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


@campaign_row("groups", section="parity")
def groups(bench: Bench) -> Row:
    """Count process groups."""
    counts = set(rehearse.ranks(count_groups, nodes=2, local=2))
    before, one, many, of_fsdp2 = max(counts)
    return Row(
        claim=f"process groups after {_CALLS} calls of fully_shard without mesh=, against 1 call",
        required="equal",
        measured=f"{many} against {one}",
        is_met=len(counts) == 1 and many == one,
        note=(
            f"2 nodes x 2 ranks on Gloo; {before} before the first call. FSDP2's own {_CALLS} calls add {of_fsdp2}. "
            "tests/comm/test_cluster.py also counts slices of meshes that are made anew."
        ),
    )


def wide_net() -> nn.Module:
    """Blocks that are much larger than their activations."""
    return sharded_net.Net(num_blocks=5, d=64, h=2048)


def peak_bytes(number: int, order: str) -> int:
    """The engine's peak on this rank, without activations, in the second step of several forwards."""
    dist.init_process_group("gloo")
    model = sharded_net.shard(sharded_net.build(wide_net), reshard_after_forward=True)
    model.set_reduce_once_per_backward(order == "reduced once")
    for _ in range(2):  # the second step prefetches
        model.zero_grad()
        model.reset_peak_memory()
        batches = (batch[dist.get_rank()] for batch in sharded_net.micro_batches(number))
        losses = (sharded_net.squared_error(model, batch) for batch in batches)
        if order == "one by one":
            for loss in losses:
                loss.backward()
        else:
            sum(losses).backward()  # type: ignore[union-attr]
    return model.memory().device_peak_bytes


@campaign_row("forwards", section="parity")
def forwards(bench: Bench) -> Row:
    """Compare peaks of several forwards before one backward with those of as many, each with its own backward."""

    def peak(number: int, order: str) -> int:
        return max(rehearse.ranks(peak_bytes, number, order, nodes=2))

    two, three = (peak(number, "together") / peak(number, "one by one") for number in (2, 3))
    single, summed, once = peak(1, "one by one"), peak(2, "one by one"), peak(3, "reduced once")
    return Row(
        claim="peak memory, two and three forwards before one backward, against one at a time",
        required="+ activations only",
        measured=f"{two:.3f}x and {three:.3f}x without activations",
        is_met=two <= 1 and three <= 1,
        note=(
            "the engine's own count, which has no activations, against as many forwards that each have their own "
            "backward, in the second step, on 2 nodes x 1 rank, with 5 blocks that are much larger than their "
            f"activations. That takes {summed / 1e6:.2f} MB a rank, and a single forward and backward "
            f"{single / 1e6:.2f} MB: whoever sums gradients has this rank's parts of the earlier ones, too. "
            "With set_reduce_once_per_backward() three forwards take "
            f"{once / summed:.2f}x: fewer bytes cross the wire, and gradients stay whole until the end."
        ),
    )
