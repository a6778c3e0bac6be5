"""Rows about the islands of 2026 at equal tokens: Muon inside, one value in sixty-four, and machines of unequal speed.

Islands are batched on one device (batched.py): a GPU trains the larger model in minutes. Runs are kept as they end, so
a row that was stopped goes on. Learning rates, those of data parallel too, and outer optimizers are chosen on a seed of
their own.

    python -m benchmarks.local_steps.front DIR    tries changes of the sparse recipe on that seed, and prints losses
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_steps.batched import BatchedJob
from benchmarks.local_steps.bench import BENCHMARK, Bench
from benchmarks.local_steps.islands import Shape
from benchmarks.local_steps.parity import TUNING_SEED, Excess, Trainer, device
from laconic.codec import codec_named
from tests.support.record import Row

_ON_GPU = BatchedJob(
    steps=3200, warm_steps=400, shape=Shape(hidden=384, intermediate=1024, layers=6, heads=8), lr=1e-3, warm_lr=1e-3,
    every=32, islands=4, eval_rows=1024,
)  # fmt: skip
_ON_CPU = BatchedJob(
    steps=1920, warm_steps=320, rows=2, islands=4, shape=Shape(hidden=64, intermediate=176, layers=2, heads=4),
    every=32, eval_rows=512,
)  # fmt: skip
_QUICK = dataclasses.replace(
    _ON_CPU, steps=24, warm_steps=8, length=32, eval_rows=64,
    shape=Shape(hidden=32, intermediate=64, layers=2, heads=4),
)  # fmt: skip
_MOST_BYTES = 1 / 2000
_SEEDS = 3
_LAST: dict[str, Any] = {"last_codec": "int4"}
"""The last exchange sends what the feedback holds, which would be lost with the end of training."""
MULOCO: dict[str, Any] = {"inner": "muon", "codec": "int2", "error_feedback": 1.0, "every": 160, **_LAST}
"""MuLoCo: Muon inside, two bits with feedback, Nesterov's momentum outside (arXiv 2505.23725)."""
SPARSE: dict[str, Any] = {"codec": "top64", "error_feedback": 0.95, "outer_lr": 1.0, "outer_momentum": 0.0, **_LAST}
"""SparseLoCo: 1.6 % of the values in two bits, a decaying feedback, plain steps outside (arXiv 2508.15706)."""
_SPARSE_OUTER: tuple[dict[str, Any], ...] = (
    {}, {"outer_momentum": 0.5}, {"outer_lr": 2.0}, {"outer_lr": 0.7, "outer_momentum": 0.9},
)  # fmt: skip
_RATES = (1.0, 2.0, 4.0)
"""Inner learning rates that are tried, as multiples of the usual one."""
_OUTER = tuple({"outer_lr": lr, "outer_momentum": momentum} for lr, momentum in ((0.7, 0.9), (1.0, 0.6), (1.0, 0.9)))
CHANGES: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "the last exchange as the others": {"last_codec": ""},
    "feedback whole": {"error_feedback": 1.0},
    "outer 1.0 and 0.5": {"outer_momentum": 0.5},
    "outer 2.0 and 0": {"outer_lr": 2.0},
    "outer 0.7 and 0.9": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "every 64": {"every": 64},
    "Muon inside": {"inner": "muon"},
    "Muon inside, outer 2.0 and 0": {"inner": "muon", "outer_lr": 2.0},
    "all values in four bits": {"codec": "int4", "error_feedback": 0.0},
    "all values, outer 0.7 and 0.9": {"codec": "int4", "error_feedback": 0.0, "outer_lr": 0.7, "outer_momentum": 0.9},
}
"""Changes of the sparse recipe."""


def _usual(bench: Bench, changes: dict[str, Any]) -> BatchedJob:
    if bench.quick:
        return dataclasses.replace(_QUICK, **{**changes, "every": 8})
    return dataclasses.replace(_ON_GPU if device().type == "cuda" else _ON_CPU, **changes)


def _best(trainer: Trainer, job: BatchedJob, candidates: Sequence[dict[str, Any]]) -> BatchedJob:
    """The job with the changes that are best on the tuning seed."""
    losses = trainer.losses([dataclasses.replace(job, **{**change, "seed": TUNING_SEED}) for change in candidates])
    return dataclasses.replace(job, **candidates[losses.index(min(losses))])


def _at_best_rate(trainer: Trainer, job: BatchedJob) -> BatchedJob:
    """The job at the learning rate that is best on the tuning seed."""
    return _best(trainer, job, [{"lr": factor * job.lr} for factor in _RATES])


class _Against:
    """The losses of a job by seed, beside data parallel with as many tokens."""

    def __init__(self, bench: Bench, trainer: Trainer, job: BatchedJob, lr: float) -> None:
        seeds = range(2 if bench.quick else _SEEDS)
        steps = round(job.tokens / (job.islands * job.rows * job.length))
        plain = {name: _data_parallel(job, steps, inner=name) for name in dict.fromkeys(("adamw", job.inner))}
        peers = {name: _at_best_rate(trainer, dataclasses.replace(peer, lr=lr)) for name, peer in plain.items()}
        of = {"own": job, **peers}
        runs = [dataclasses.replace(run, seed=seed) for run in of.values() for seed in seeds]
        flat = trainer.losses(runs)
        found = {name: flat[index * len(seeds) :][: len(seeds)] for index, name in enumerate(of)}
        self.by_peer = {name: Excess(found["own"], found[name]) for name in peers}
        self.losses = {name: statistics.mean(each) for name, each in found.items()}
        self.rates = {name: each.lr for name, each in of.items()}


def _data_parallel(job: BatchedJob, steps: int, *, inner: Any) -> BatchedJob:
    """Data parallel over the rows of all islands, with nothing of theirs by which equal runs would differ."""
    usual = BatchedJob(steps=steps)
    shared = ("seed", "warm_steps", "warm_lr", "rows", "length", "shape", "lr", "eval_rows", "islands")
    return dataclasses.replace(usual, kind="ddp", inner=inner, **{name: getattr(job, name) for name in shared})


def bytes_against_data_parallel(job: BatchedJob) -> float:
    """The bytes that an island sends, as a share of those of every-step data parallel in fp32 over a ring.

    A sparse codec sends each value to all others in one trip; the others take two trips of a part each.
    """
    numel = sum(parameter.numel() for parameter in job.shape.build(1, seed=0, device="meta").parameters())
    ring = 2 * (job.islands - 1) / job.islands

    def sent(name: str) -> float:
        codec = codec_named(name)
        return (job.islands - 1 if codec.is_sparse else ring) * codec.payload_bytes(numel)

    syncs = job.steps // job.every
    own = (syncs - 1) * sent(job.codec) + sent(job.last_codec or job.codec)
    steps = job.tokens / (job.islands * job.rows * job.length)  # of data parallel, for as many tokens
    return own / (steps * ring * 4 * numel)


def _row(bench: Bench, changes: dict[str, Any], *, what: str, limit: float, candidates: tuple[dict[str, Any], ...],
         note: str) -> Row:  # fmt: skip
    usual = _usual(bench, changes)
    trainer = Trainer(bench, usual.length)
    chosen = _best(trainer, usual, [{"lr": factor * usual.lr, **each} for factor in _RATES for each in candidates])
    against, share = _Against(bench, trainer, chosen, usual.lr), bytes_against_data_parallel(chosen)
    millions = sum(p.numel() for p in usual.shape.build(1, seed=0, device="meta").parameters()) / 1e6
    means = ", ".join(f"{name} {loss:.4f} at {against.rates[name]:g}" for name, loss in against.losses.items())
    against_peers = ", ".join(f"{name} {excess}" for name, excess in against.by_peer.items())
    return Row(
        claim=f"eval loss at equal tokens against every-step data parallel, {what}; bytes a token",
        required=f"<= {limit:+.1%}; <= 1/2,000",
        measured=f"{against.by_peer['adamw']}; 1/{1 / share:,.0f}",
        is_met=against.by_peer["adamw"].mean <= limit and share <= _MOST_BYTES,
        note=(
            f"mean ± standard error by seed; against data parallel with {against_peers}. Losses, each at the learning "
            f"rate that is the best of {len(_RATES)} on another seed: {means}. "
            f"{millions:.2f} M parameters, {usual.islands} islands, {usual.steps} steps of {usual.rows} x "
            f"{usual.length} tokens an island after {usual.warm_steps} of data parallel, on one cosine, "
            f"{chosen.codec} every {chosen.every} steps, {chosen.last_codec or chosen.codec} at the end. "
            f"Outer rate and momentum {chosen.outer_lr:g} and {chosen.outer_momentum:g}, feedback "
            f"{chosen.error_feedback:g}. {note}"
        ),
    )


@BENCHMARK.row("muloco", section="islands-front")
def muloco(bench: Bench) -> Row:
    return _row(
        bench, MULOCO, what="MuLoCo: Muon inside, int2 with feedback", limit=0.002, candidates=_OUTER,
        note="The outer optimizer is the best of three on that seed, at each rate.",
    )  # fmt: skip


@BENCHMARK.row("sparse", section="islands-front")
def sparse(bench: Bench) -> Row:
    usual = _usual(bench, SPARSE)
    trainer = Trainer(bench, usual.length)
    listed = ", ".join(f"{name} {excess:+.2%}" for name, excess in _tried(trainer, usual).items())
    return _row(
        bench, SPARSE, what="SparseLoCo: 64 of 4,096 values in two bits", limit=0.005, candidates=_SPARSE_OUTER,
        note=(
            "The outer optimizer is the best of four on that seed, at each rate. There, against data parallel, with "
            f"changes of the paper's recipe: {listed}."
        ),
    )  # fmt: skip


@BENCHMARK.row("unequal-speeds", section="islands-front")
def unequal_speeds(bench: Bench) -> Row:
    islands = _ON_GPU.islands
    every = _usual(bench, {}).steps // 8
    speeds = tuple(1.0 if island < islands // 2 else 0.5 for island in range(islands))
    return _row(
        bench, {**MULOCO, "every": every, "speeds": speeds}, limit=0.005,
        what="half of the islands at half the speed, means by tokens",
        candidates=(_OUTER[1],), note="The outer optimizer is that of MuLoCo's row. Nobody waits for a slow island: it "
        "joins a sync with the steps that it has.",
    )  # fmt: skip


def _tried(trainer: Trainer, usual: BatchedJob) -> dict[str, float]:
    """The excess of the loss over that of data parallel on the tuning seed, by change of the sparse recipe."""
    peer = _at_best_rate(trainer, _data_parallel(usual, usual.steps, inner="adamw"))
    recipe = _at_best_rate(trainer, usual)
    runs = [peer, *(dataclasses.replace(recipe, **change) for change in CHANGES.values())]
    base, *losses = trainer.losses([dataclasses.replace(run, seed=TUNING_SEED) for run in runs])
    return {name: loss / base - 1 for name, loss in zip(CHANGES, losses, strict=True)}


def try_changes(folder: Path) -> None:
    """Print the excess of each change of the sparse recipe on the tuning seed over data parallel."""
    bench = Bench(folder, quick=False)
    usual = _usual(bench, SPARSE)
    for name, excess in _tried(Trainer(bench, usual.length), usual).items():
        print(f"{name}: {excess:+.2%}", flush=True)


if __name__ == "__main__":
    try_changes(Path(sys.argv[1]))
