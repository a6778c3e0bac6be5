"""Checksums and audits: what they see of single flipped bits, wherever training holds them, and what they cost.

A flip happens on one rank of 2 nodes x 2 ranks, in one step that is checked or audited. Checksums must see each flip on
the wire and in a cache, on all ranks. What an audit sees is reported, by place and bit, and so is what nothing sees.

Their cost is taken in interleaved pairs: one launch of 2 nodes x 2 ranks holds the same model twice, with checks and
without, and steps them in turn, so the two meet the same noise of the machine. The surplus of a step that is checked,
or audited, is divided by the interval.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.shard.bucket import Bucket
from laconic.shard.unit import units_below
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support.flips import VICTIM, Flip, flip_bit, flipping, flipping_in_gradients, flipping_in_use
from tests.support.launch import launch
from tests.support.record import Row
from tests.support.sharded_net import Net, shard

_FIELDS = {
    "mantissa 0-11": range(12),
    "mantissa 12-22": range(12, 23),
    "exponent": range(23, 31),
    "sign": range(31, 32),
}
"""The bits of a float32."""
_BITS = range(32)
_TIMEOUT_S = 1800.0


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclass
class _Trial:
    """A sharded model, and steps that a flip disturbs."""

    model: Any
    batch: Tensor

    @classmethod
    def of(cls, cache: Any, checks: laconic.Checks | None, *, is_frozen: bool = False) -> _Trial:
        torch.manual_seed(0)
        model: Any = Net()
        if is_frozen:
            model.blocks.requires_grad_(False)
        shard(model, cache=cache, checks=checks)
        trial = cls(model, torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank())))
        trial.step()
        return trial

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


Seen = Counter[tuple[str, int, bool]]
"""The number of flips by place, bit and whether a rank saw them."""
_Tries = Iterator[tuple[str, int, bool]]


def job(bits: Sequence[int], num_seeds: int) -> Seen:
    """Try every place, bit and seed on this rank, beside the other ranks."""
    seen: Seen = Counter()
    cases = [(bit, seed) for bit in bits for seed in range(num_seeds)]
    for place, tries in {"wire": _wire, "cache": _cache, "audit": _audit}.items():
        for name, bit, is_seen in tries(cases):
            seen[f"{place}: {name}", bit, is_seen] += 1
    return seen


def _wire(cases: Sequence[tuple[int, int]]) -> _Tries:
    for cache in ("none", "host"):
        trial = _Trial.of(cache, laconic.Checks(interval=1))
        for bit, seed in cases:
            for purpose in ("weights", "gradients"):
                for level in ("node", "local"):
                    flip = Flip(rank=VICTIM, purpose=purpose, level=level, bit=bit, seed=seed)
                    trial.model.invalidate()  # weights cross in each step
                    with flipping(flip):
                        yield f"{purpose}, {level} level", bit, trial.is_seen(trial.step)
        yield "no flip", 0, trial.is_seen(trial.step)


def _cache(cases: Sequence[tuple[int, int]]) -> _Tries:
    for kind, is_frozen in (("weights that train", False), ("frozen weights", True)):
        trial = _Trial.of("host", laconic.Checks(interval=1), is_frozen=is_frozen)
        for bit, seed in cases:
            (bucket,) = trial.model.blocks[seed % 3]._laconic_unit.buckets

            def damage(bucket: Bucket = bucket, bit: int = bit, seed: int = seed) -> None:
                if dist.get_rank() == VICTIM and bucket.node_shard.is_kept:
                    flip_bit(bucket.node_shard.buffer(), bit=bit, seed=seed)

            if is_frozen:  # it rests in the cache from step to step
                damage()
                yield kind, bit, trial.is_seen(trial.step)
                damage()  # flip it back
            else:
                yield kind, bit, trial.is_seen(functools.partial(trial.step, damage))
        yield "no flip", 0, trial.is_seen(trial.step)


def _audit(cases: Sequence[tuple[int, int]]) -> _Tries:
    trial = _Trial.of("none", None)
    optimizer = torch.optim.AdamW(trial.model.parameters())
    optimizer.step()
    shards = [bucket.shard for unit in units_below(trial.model) for bucket in unit.buckets]
    moments = [entry["exp_avg"].to_local() for entry in optimizer.state.values()]
    resting = {"a rank's own shard": shards, "optimizer states": [each for each in moments if each.numel()]}

    def audit() -> None:
        laconic.audit(trial.model, trial.batch, _loss)

    for bit, seed in cases:
        with flipping_in_use(seed, bit=bit, seed=seed):
            yield "gathered weights in use", bit, trial.is_seen(audit)
        with flipping_in_gradients(seed, bit=bit, seed=seed):
            yield "gradients before their sum", bit, trial.is_seen(audit)
        for name, tensors in resting.items():
            damaged = tensors[seed % len(tensors)]
            if dist.get_rank() == VICTIM:
                flip_bit(damaged, bit=bit, seed=seed)
            yield name, bit, trial.is_seen(audit)
            if dist.get_rank() == VICTIM:
                flip_bit(damaged, bit=bit, seed=seed)
    yield "no flip", 0, trial.is_seen(audit)


@campaign_row("bit-flips")
def row(bench: Bench) -> Row:
    """Flip bits everywhere."""
    bits, num_seeds = ((0, 13, 30), 2) if bench.quick else (_BITS, 4)
    seen, *others = launch(job, bits, num_seeds, num_ranks=4, num_local=2, timeout_s=_TIMEOUT_S)
    places = dict.fromkeys(place for place, _, _ in seen)
    checked = [place for place in places if place.startswith(("wire", "cache")) and not place.endswith("no flip")]
    audited = [place for place in places if place.startswith("audit") and not place.endswith("no flip")]
    rates = "; ".join(f"{place.removeprefix('audit: ')} {_rate(place, seen)}" for place in audited)
    return faults_row(
        claim="flipped bits in weights and gradients on the wire, and in the host cache, against checksums",
        tried=sum(_count(seen, place, _BITS) for place in checked),
        at_least=1 if bench.quick else 1000,
        harms={
            "unseen": sum(_count(seen, place, _BITS, is_seen=False) for place in checked),
            "seen by some ranks only": sum(other != seen for other in others),
            "false alarms": sum(
                _count(seen, place, _BITS, is_seen=True) for place in places if place.endswith("no flip")
            ),
        },
        note=f"2 nodes x 2 ranks, fp32, each bit of a word. Seen by an audit in the step of the flip: {rates}.",
    )


def _count(seen: Seen, place: str, bits: Sequence[int], *, is_seen: bool | None = None) -> int:
    outcomes = (False, True) if is_seen is None else (is_seen,)
    return sum(seen[place, bit, outcome] for bit in bits for outcome in outcomes)


def _rate(place: str, seen: Seen) -> str:
    def share(bits: Sequence[int]) -> str:
        return f"{_count(seen, place, bits, is_seen=True)} of {_count(seen, place, bits)}"

    by_field = ", ".join(f"{name} {share(bits)}" for name, bits in _FIELDS.items())
    return f"{share(_BITS)} ({by_field})"


# -- the cost ----------------------------------------------------------------------------------------------------------

_LIMIT = 0.01
_AUDIT_INTERVAL = 1000
"""The interval that the documentation advises."""


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
        order = (plain, checked) if pair % 2 else (checked, plain)
        times = {model: seconds(step, model) for model in order}
        found.append((times[plain], times[checked], seconds(laconic.audit, plain, x, _loss)))
    return found[1:]  # the first pair allocates


@campaign_row("check-cost")
def cost(bench: Bench) -> Row:
    """Measure the surplus of checked steps and of audits."""
    size = (4, 64, 2, 32) if bench.quick else (12, 512, 6, 512)
    times = launch(job_of_pairs, *size, num_ranks=4, num_local=2, timeout_s=_TIMEOUT_S)[0]
    plain = statistics.median(each for each, _, _ in times)
    surplus = statistics.median(checked - each for each, checked, _ in times)
    audit = statistics.median(each for _, _, each in times)
    interval = laconic.Checks().interval
    shares = surplus / interval / plain, audit / _AUDIT_INTERVAL / plain
    return Row(
        claim=f"seconds that checksums every {interval} steps / audits every {_AUDIT_INTERVAL} steps add to a step",
        required=f"<= {_LIMIT:.0%} / <= {_LIMIT:.0%}",
        measured=f"{shares[0]:.3%} / {shares[1]:.3%}",
        is_met=max(shares) <= _LIMIT,
        note=(
            f"medians of {len(times)} pairs of steps in turn, 2 nodes x 2 ranks on this machine's cores, fp32, host "
            f"cache: a plain step takes {1e3 * plain:.1f} ms, a checked one {1e3 * surplus:.1f} ms more, and an audit "
            f"{1e3 * audit:.1f} ms."
        ),
    )
