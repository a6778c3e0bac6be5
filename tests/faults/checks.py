"""Checksums: whether they see single flipped bits; and what they and audits cost.

A flip happens on one rank of 2 nodes x 2 ranks, in one step that is checked. Checksums must see each flip on the wire
and in a cache, on all ranks. tests/guard/test_audit.py shows what audits see.

Their cost is taken in interleaved pairs: one launch holds the same model with checks and without, and steps them in
turn, so the two meet the same noise of the machine.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from tests.faults.bench import Bench, Found, campaign
from tests.support.flips import VICTIM, Flip, flip_bit, flipping
from tests.support.launch import launch
from tests.support.sharded_net import Net, shard

_TIMEOUT_S = 1800.0
Tries = Iterator[tuple[str, bool]]
"""The place of each flip, and whether this rank has seen it."""


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


class _Trial:
    """A sharded model, and steps that a flip disturbs."""

    def __init__(self, cache: str, checks: laconic.Checks | None, *, is_frozen: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.model.blocks.requires_grad_(not is_frozen)
        shard(self.model, cache=cache, checks=checks)
        self.batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.step()

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Take a step; `between` runs after forward."""
        loss = _loss(self.model, self.batch)
        between()
        loss.backward()

    def is_seen(self, action: Callable[[], None]) -> bool:
        """Run `action`; return whether it ended in a CorruptionError. Weights are gathered anew afterwards."""
        try:
            action()
        except laconic.CorruptionError:
            return True
        finally:
            self.model.reset_iter_state()
            self.model.zero_grad()
        return False


def _wire(cases: Sequence[tuple[int, int]]) -> Tries:
    for cache in ("none", "host"):
        trial = _Trial(cache, laconic.Checks(interval=1))
        for (bit, seed), purpose, level in itertools.product(cases, ("weights", "gradients"), ("node", "local")):
            trial.model.invalidate()  # weights cross in each step
            with flipping(Flip(rank=VICTIM, purpose=purpose, level=level, bit=bit, seed=seed)):  # type: ignore[arg-type]
                yield f"{purpose}, {level} level", trial.is_seen(trial.step)
        yield "no flip", trial.is_seen(trial.step)


def _cache(cases: Sequence[tuple[int, int]]) -> Tries:
    for is_frozen in (False, True):
        trial = _Trial("host", laconic.Checks(interval=1), is_frozen=is_frozen)
        for bit, seed in cases:
            (bucket,) = trial.model.blocks[seed % 3]._laconic_unit.buckets

            def damage(bucket: Any = bucket, bit: int = bit, seed: int = seed) -> None:
                if dist.get_rank() == VICTIM and bucket.node_shard.is_kept:
                    flip_bit(bucket.node_shard.buffer(), bit=bit, seed=seed)

            if is_frozen:  # it rests in the cache from step to step
                damage()
                yield "frozen weights", trial.is_seen(trial.step)
                damage()  # flip it back
            else:
                yield "weights that train", trial.is_seen(functools.partial(trial.step, damage))
        yield "no flip", trial.is_seen(trial.step)


def job(bits: Sequence[int], num_seeds: int) -> Counter[tuple[str, bool]]:
    """Try every bit and seed: how many flips this rank has seen or not, by place."""
    cases = [(bit, seed) for bit in bits for seed in range(num_seeds)]
    return Counter([*_wire(cases), *_cache(cases)])


@campaign(
    "bit-flips",
    "flipped bits in weights and gradients on the wire, and in the host cache, against checksums",
    harms=("unseen", "seen by some ranks only", "false alarm"),
)
def flips(bench: Bench) -> Found:
    """Flip bits everywhere."""
    bits, num_seeds = ((0, 13, 30), 2) if bench.quick else (range(32), 4)
    seen, *others = launch(job, bits, num_seeds, num_ranks=4, num_local=2, timeout_s=_TIMEOUT_S)
    harms = ["seen by some ranks only" for other in others if other != seen]
    for (place, is_seen), count in seen.items():
        if is_seen == (place == "no flip"):
            harms += ["false alarm" if is_seen else f"unseen: {place}"] * count
    return seen.total(), harms, "2 nodes x 2 ranks, fp32."


# -- the cost ----------------------------------------------------------------------------------------------------------

_LIMIT, _AUDIT_INTERVAL = 0.01, 1000
"""The share of a step that they may take, and the interval that the documentation advises."""


def job_of_pairs(pairs: int, width: int, num_blocks: int, rows: int) -> list[tuple[float, float, float]]:
    """The seconds of a plain step, a checked one and an audit, by pair, on this rank."""
    torch.manual_seed(0)
    plain: Any = Net(num_blocks, width, 4 * width)
    checked = shard(copy.deepcopy(plain), cache="host", checks=laconic.Checks(interval=1))
    plain = shard(plain, cache="host")
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (plain, checked)}
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(model: Any) -> None:
        _loss(model, x).backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    def seconds(action: Any, *arguments: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        action(*arguments)
        dist.barrier()
        return time.perf_counter() - began

    found = []
    for pair in range(pairs + 1):
        times = {model: seconds(step, model) for model in ((plain, checked) if pair % 2 else (checked, plain))}
        found.append((times[plain], times[checked], seconds(laconic.audit, plain, x, _loss)))
    return found[1:]  # the first pair allocates


@campaign(
    "check-cost",
    f"checksums at their interval, and audits every {_AUDIT_INTERVAL} steps, add {_LIMIT:.0%} of a step at most",
    harms=("more",),
)
def cost(bench: Bench) -> Found:
    """Measure the surplus of checked steps and of audits."""
    size = (4, 64, 2, 32) if bench.quick else (12, 512, 6, 512)
    times = launch(job_of_pairs, *size, num_ranks=4, num_local=2, timeout_s=_TIMEOUT_S)[0]
    plain, surplus, audit = map(statistics.median, zip(*((p, c - p, a) for p, c, a in times), strict=True))
    shares = surplus / laconic.Checks().interval / plain, audit / _AUDIT_INTERVAL / plain
    note = f"{shares[0]:.3%} / {shares[1]:.3%} of a step of {1e3 * plain:.1f} ms, medians of pairs of steps in turn."
    return len(times), [f"more: {share:.3%}" for share in shares if share > _LIMIT], note
