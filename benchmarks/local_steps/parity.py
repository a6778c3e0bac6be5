"""Rows about the loss of partial updates closer to the paper's setting: a larger model, and more holders of each slice.

Islands are batched on one device (batched.py). A GPU trains the larger model, and a row takes some minutes; a CPU
trains a model of a tenth of the parameters in an hour or two. Runs are kept as they end, so a row that was stopped
goes on.

    python -m benchmarks.local_steps.parity DIR    tries remedies on a seed of its own, and prints their losses
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.local_steps.batched import Batched, BatchedJob
from benchmarks.local_steps.bench import BENCHMARK, Bench
from benchmarks.local_steps.islands import Shape
from benchmarks.local_steps.partial import step_cost_of
from tests.support.record import Row

_ON_GPU = BatchedJob(
    steps=400, warm_steps=200, shape=Shape(hidden=384, intermediate=1024, layers=6, heads=8), lr=1e-3, warm_lr=1e-3,
    every=21, fragments=3, overlap=2, codec="int4", eval_rows=1024,
)  # fmt: skip
_ON_CPU = BatchedJob(
    steps=320, warm_steps=200, rows=2, shape=Shape(layers=5), every=16, fragments=4, overlap=2, codec="int4",
    eval_rows=512,
)  # fmt: skip
_QUICK = dataclasses.replace(
    _ON_GPU, steps=24, warm_steps=8, length=32, eval_rows=64, every=12,
    shape=Shape(hidden=32, intermediate=64, layers=3, heads=4),
)  # fmt: skip
SLICES = (2, 4)
TUNING_SEED = 100


def _sliced(*each: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"sliced_lr": lr, "sliced_momentum": momentum} for lr, momentum in each]


OUTER: dict[int, list[dict[str, Any]]] = {
    1: [{"outer_lr": lr, "outer_momentum": momentum} for lr, momentum in ((0.7, 0.9), (0.7, 0.8))],
    2: _sliced((0.5, 0.8), (0.4, 0.8), (0.5, 0.6)),
    4: _sliced((0.3, 0.8), (0.2, 0.8), (0.3, 0.6)),
}
"""The outer optimizers to choose from on `TUNING_SEED`: of all parameters, and of slices by their number."""
REMEDIES: tuple[dict[str, Any], ...] = (
    {"rotate": 1}, {"rotate": 4}, {"sliced_inner_lr": 0.7}, {"sliced_inner_lr": 1.4}, {"include": ("mlp",)},
    {"include": ("attention",)},
)  # fmt: skip
"""Further changes of sliced runs."""


class Trainer:
    """Trains jobs of one length, each once: the folder of a benchmark keeps their losses."""

    def __init__(self, bench: Bench, length: int) -> None:
        self._bench = bench
        self._batched = Batched(bench.folder / "tokens", length, device())

    def loss(self, job: BatchedJob) -> float:
        """Return the loss of the outer parameters after a job."""
        return self.losses([job])[0]

    def losses(self, jobs: Sequence[BatchedJob]) -> list[float]:
        """Return the losses of the outer parameters after some jobs, several of which run at once on a GPU."""
        missing = dict.fromkeys(job for job in jobs if not self._bench.has(job))
        for job, loss in self._batched.train_each(list(missing)):
            self._bench.keep(job, loss)
            print(f"{_described(job)}: {loss:.4f}", flush=True)
        return [float(self._bench.read(job)) for job in jobs]


def _described(job: BatchedJob) -> str:
    """The fields in which a job is no usual one."""
    usual = BatchedJob(steps=job.steps)
    changes = {name: value for name, value in vars(job).items() if value != getattr(usual, name) and name != "shape"}
    return ", ".join(f"{name} {value}" for name, value in changes.items())


def device() -> torch.device:
    """The accelerator, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _usual_job() -> BatchedJob:
    return _ON_GPU if device().type == "cuda" else _ON_CPU


def flops_saved(run: BatchedJob, slices: int) -> float:
    """Return the share of a step's FLOPs that an island saves by training one of the slices."""
    whole, part = (
        step_cost_of(
            run.shape.build(run.length, seed=0, device="meta"), slices=count, batch=run.rows, sequence=run.length
        ).flops
        for count in (1, slices)
    )
    return 1 - part / whole


class Excess:
    """By how much some losses exceed others, seed by seed, as fractions of the latter."""

    def __init__(self, losses: Sequence[float], baseline: Sequence[float]) -> None:
        by_seed = [a / b - 1 for a, b in zip(losses, baseline, strict=True)]
        self.mean = statistics.mean(by_seed)
        self.error = statistics.stdev(by_seed) / math.sqrt(len(by_seed))
        """The standard error of the mean."""

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


def _tuned(trainer: Trainer, usual: BatchedJob) -> dict[int, BatchedJob]:
    """Return the run of each number of slices with the outer optimizer that is best on the tuning seed."""
    chosen: dict[int, BatchedJob] = {}
    for slices, candidates in OUTER.items():
        start = dataclasses.replace(chosen.get(1, usual), slices=slices, seed=TUNING_SEED)
        losses = []
        for change in candidates:
            losses.append(trainer.loss(dataclasses.replace(start, **change)))
            print(f"{slices} slices, {change}: {losses[-1]:.4f}", flush=True)
        chosen[slices] = dataclasses.replace(start, **candidates[losses.index(min(losses))])
    return chosen


def _row(bench: Bench, islands: int, seeds: int) -> Row:
    seeds = 2 if bench.quick else seeds
    usual = dataclasses.replace(_QUICK if bench.quick else _usual_job(), islands=islands)
    trainer = Trainer(bench, usual.length)
    chosen = _tuned(trainer, usual)
    saved = {slices: flops_saved(usual, slices) for slices in SLICES}
    longer = {
        slices: dataclasses.replace(chosen[slices], steps=round(usual.steps / (1 - saved[slices]))) for slices in SLICES
    }
    runs = {"streaming": chosen[1]}
    runs |= {f"{slices}, equal steps": chosen[slices] for slices in SLICES}
    runs |= {f"{slices}, equal FLOPs": longer[slices] for slices in SLICES}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(seeds):
        for name, run in runs.items():
            found[name].append(trainer.loss(dataclasses.replace(run, seed=seed)))
        print(f"seed {seed}: {', '.join(f'{name} {losses[-1]:.4f}' for name, losses in found.items())}", flush=True)
    base = found["streaming"]
    at_steps, at_flops = (
        [Excess(found[f"{slices}, equal {name}"], base) for slices in SLICES] for name in ("steps", "FLOPs")
    )
    rates = ", ".join(f"{n} slices {chosen[n].sliced_lr:g} and {chosen[n].sliced_momentum:g}" for n in SLICES)
    millions = sum(p.numel() for p in usual.shape.build(1, seed=0).parameters()) / 1e6
    return Row(
        claim=f"partial updates of 2 / 4 slices against streaming DiLoCo, {islands} islands, equal steps; equal FLOPs",
        required="<= +0.5 / +1 %; <= 0 %; standard error below 0.2 %",
        measured="; ".join(" / ".join(map(str, each)) for each in (at_steps, at_flops)),
        is_met=all(
            each.error < 0.002 and each.mean <= limit
            for each, limit in zip((*at_steps, *at_flops), (0.005, 0.01, 0.0, 0.0), strict=True)
        ),
        note=(
            f"eval loss, seed by seed, mean ± standard error of {seeds} seeds; streaming {statistics.mean(base):.4f}. "
            f"{millions:.1f} M parameters; {usual.steps} steps of {islands} x {usual.rows} x {usual.length} tokens "
            f"after {usual.warm_steps} of data parallel, on one cosine from {usual.lr:g}; at equal FLOPs "
            + " / ".join(str(longer[n].steps) for n in SLICES)
            + f" steps, as an island saves {' / '.join(f'{saved[n]:.1%}' for n in SLICES)}. Every {usual.every} "
            f"steps, {usual.fragments} fragments with overlap {usual.overlap}, {usual.codec}. Each slice has "
            f"{' / '.join(str(islands // n) for n in SLICES)} holders. Outer rate and momentum {chosen[1].outer_lr:g} "
            f"and {chosen[1].outer_momentum:g}; of {rates}; the best of "
            f"{' / '.join(str(len(o)) for o in OUTER.values())} on another seed."
        ),
    )


@BENCHMARK.row("parity-8", section="partial-parity")
def parity_8(bench: Bench) -> Row:
    return _row(bench, 8, seeds=5)


@BENCHMARK.row("parity-16", section="partial-parity")
def parity_16(bench: Bench) -> Row:
    return _row(bench, 16, seeds=5)


def try_remedies(folder: Path) -> None:
    """Print the loss of each remedy on the tuning seed, beside that of streaming."""
    usual = _usual_job()
    trainer = Trainer(Bench(folder, quick=False), usual.length)
    chosen = _tuned(trainer, usual)
    base = trainer.loss(chosen[1])
    for slices in SLICES:
        for change in ({}, *REMEDIES):
            loss = trainer.loss(dataclasses.replace(chosen[slices], **change))
            print(f"{slices} slices, {change}: {loss:.4f}, {loss / base - 1:+.2%}", flush=True)


if __name__ == "__main__":
    try_remedies(Path(sys.argv[1]))
