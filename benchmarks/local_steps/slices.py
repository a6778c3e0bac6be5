"""Rows about slices: the loss at equal tokens, the outer steps of slices, and the time to a loss on a thin wire.

    python -m benchmarks.local_steps --rows slices-mlp-8,slices-heads-8                on two cores: some 40 minutes
    python -m benchmarks.local_steps --rows slices-mlp-8,... --size full --device cuda  10.8 M parameters, five seeds

MLPs come first, because they are what Partial Parameter Updates (arXiv 2509.22418) slice by its reviews. Islands stream
fragments in four bits. They are compared with islands that train everything, in the same steps on the same rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import laconic
from benchmarks.local_steps.bench import BENCHMARK, OUTER_MOMENTUM, SIZES, Bench
from benchmarks.local_steps.islands import MAX_NORM, Answer, Job, adamw_of
from laconic.partial.patterns import SLICED_BY_DEFAULT, Kind
from tests.support.record import Row

SLICES = (2, 4, 8)
_BOTH: tuple[Kind, ...] = ("mlp", "attention")
_RATE = 20e6
"""The bits that a site sends in a second."""
_HOLDERS = 8


def by_roots(slices: int) -> tuple[float, float]:
    """A rule that was tried: both fall, the rate with the square root of the holders, the momentum with the fourth."""
    return 0.7 * (1 / slices) ** 0.5, OUTER_MOMENTUM * (1 / slices) ** 0.25


GRID = {4: [by_roots(4), (0.7, 0.8)], 8: [by_roots(8), (0.5, 0.5)]}
"""The outer learning rate and momentum of slices that are tried beside the default, by the number of slices."""


def job_of(bench: Bench, seed: int, *, islands: int, **changes: Any) -> Job:
    """A job of the rows about slices; without `changes` its islands train everything."""
    told = ", ".join(f"{key} {value}" for key, value in changes.items()) or "whole"
    shared = {"overlap": 1, "codec": "int4", "outer_momentum": OUTER_MOMENTUM, **bench.size.job}
    return Job(
        name=f"{told}/{seed}", seed=seed, islands=islands, device=bench.device, shape=bench.size.shape,
        **{**shared, **changes},
    )  # fmt: skip


class Excess:
    """How far the final loss of slices is above that of islands that train everything, seed by seed."""

    def __init__(self, bench: Bench, *, islands: int, **changes: Any) -> None:
        self.by_seed = [
            _loss(bench, job_of(bench, seed, islands=islands, **changes))
            / _loss(bench, job_of(bench, seed, islands=islands))
            - 1
            for seed in range(bench.slice_seeds)
        ]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.by_seed)

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite for one seed, which shows none."""
        count = len(self.by_seed)
        return statistics.stdev(self.by_seed) / count**0.5 if count > 1 else float("inf")


def _loss(bench: Bench, job: Job) -> float:
    return bench.answer_of(job).evaluations[-1][1]


def _row(include: tuple[Kind, ...], islands: int) -> Callable[[Bench], Row]:
    is_default = include == SLICED_BY_DEFAULT
    what, changes = ("MLPs", {}) if is_default else ("MLPs and heads", {"include": include})

    def measure(bench: Bench) -> Row:
        found = {n: Excess(bench, islands=islands, slices=n, **changes) for n in SLICES}
        worst = max(excess.error for excess in found.values())
        by_seed = "; ".join(f"1/{n} " + ", ".join(f"{each:+.2%}" for each in found[n].by_seed) for n in SLICES)
        return Row(
            claim=f"eval loss at equal tokens, 1/2, 1/4 and 1/8 of {what}, against streaming DiLoCo, {islands} islands",
            measured=" / ".join(f"{found[n].mean:+.2%}" for n in SLICES)
            + (f", standard error <= {worst:.2%}" if bench.slice_seeds > 1 else ", one seed"),
            note=f"by seed: {by_seed}. {_described(bench, islands, bench.slice_seeds)}",
        )

    return measure


for _name, _include in (("mlp", SLICED_BY_DEFAULT), ("heads", _BOTH)):  # the published form first
    for _islands in (8, 16):
        BENCHMARK.row(f"slices-{_name}-{_islands}")(_row(_include, _islands))


def _numel(bench: Bench, islands: int) -> int:
    return bench.answer_of(job_of(bench, 0, islands=islands)).num_parameters


def _described(bench: Bench, islands: int, seeds: int = 1) -> str:
    job = job_of(bench, 0, islands=islands)
    return (
        f"{_numel(bench, islands) / 1e6:.2f} M parameters, {seeds} seed(s), {job.steps} steps of {islands} "
        f"x {job.rows} x {job.length} tokens after {job.warm_steps} of data parallel, on one cosine from {job.lr:g}; "
        f"every {job.every}, {job.fragments} fragments, overlap {job.overlap}, {job.codec}; outer {job.outer_lr:g} and "
        f"{job.outer_momentum:g}, of slices the default; losses of the outer parameters."
    )


@BENCHMARK.row("slices-outer")
def outer_steps(bench: Bench) -> Row:
    """The default outer steps of slices of MLPs beside others, on one seed."""
    lines, behind = [], []
    for slices, tried in GRID.items():
        jobs = {(lr, beta): job_of(bench, 0, islands=_HOLDERS, slices=slices, sliced_lr=lr, sliced_momentum=beta)
                for lr, beta in tried}  # fmt: skip
        whole = _loss(bench, job_of(bench, 0, islands=_HOLDERS))
        found = {pair: _loss(bench, job) / whole - 1 for pair, job in jobs.items()}
        own = _loss(bench, job_of(bench, 0, islands=_HOLDERS, slices=slices)) / whole - 1
        behind.append(own - min(found.values()))
        told = ", ".join(f"{lr:g} and {beta:g} {value:+.2%}" for (lr, beta), value in found.items())
        lines.append(f"{_HOLDERS // slices} holders: default {own:+.2%}; {told}")
    return Row(
        claim=f"outer rate and momentum of slices by their holders, of {_HOLDERS} islands: the default behind the best",
        measured=", ".join(f"{value:+.2%} (1/{n} of MLPs)" for n, value in zip(GRID, behind, strict=True)),
        note=f"against islands that train everything, seed 0: {'; '.join(lines)}. {_described(bench, _HOLDERS)}",
    )


# -- a thin wire -------------------------------------------------------------------------------------------------------


def seconds_by_step(job: Job, sent_bytes: Sequence[float], step_s: float, bits_per_s: float) -> list[float]:
    """The seconds at the end of each step, of an island whose wire carries one exchange beside the steps.

    `sent_bytes` has the bytes of the exchanges whose means are applied after each step. An exchange begins with the
    step that sends it, `overlap` steps before, and the island waits for what has not arrived when it applies it.
    """
    ends: list[float] = []
    for step, nbytes in enumerate(sent_bytes):
        now = (ends[-1] if ends else 0.0) + step_s
        if nbytes:
            began = ends[step - job.overlap] if job.overlap else now
            now = max(now, began + 8 * nbytes / bits_per_s)
        ends.append(now)
    return ends


def time_to(loss: float, answer: Answer, ends: Sequence[float]) -> float:
    """The seconds until the evaluations, with straight lines between them, first reach a loss; infinite if never."""
    points = [(0.0 if step == 0 else ends[step - 1], value) for step, value in answer.evaluations]
    for (t0, before), (t1, after) in pairwise(points):
        if after <= loss <= before:
            return t0 + (t1 - t0) * (before - loss) / (before - after)
    return float("inf")


@BENCHMARK.row("slices-time")
def time_to_a_loss(bench: Bench) -> Row:
    """The time of slices to their final loss, over that of islands that train everything to the same loss."""
    jobs = {n: job_of(bench, 0, islands=_HOLDERS, **({"slices": n} if n > 1 else {})) for n in (1, *SLICES)}
    clocks = [replace(job, shape=SIZES["full"].shape, rows=1, length=128) for job in jobs.values()]
    step_s = dict(zip(jobs, step_seconds(clocks), strict=True))
    curve = bench.answer_of(job_of(bench, 0, islands=_HOLDERS, eval_every=bench.size.job["steps"] // 8))
    numel = sum(p.numel() for p in clocks[0].shape.build(128, seed=0).parameters())
    sent = [numel / curve.num_parameters * nbytes for nbytes in curve.sent_bytes]  # slices send as many
    ends = {n: seconds_by_step(job, sent, step_s[n], _RATE) for n, job in jobs.items()}
    goals = {n: _loss(bench, jobs[n]) for n in SLICES}
    wholes = {n: min(time_to(goal, curve, ends[1]), ends[1][-1]) for n, goal in goals.items()}
    ratios = {n: ends[n][-1] / wholes[n] for n in SLICES}
    slower = {n: step_s[n] / step_s[1] - 1 for n in SLICES}
    told = "; ".join(
        f"1/{n} {ends[n][-1]:.0f} s against {wholes[n]:.0f} s to {goals[n]:.4f}, a step {slower[n]:+.1%}"
        for n in SLICES
    )
    return Row(
        claim=f"time to a loss at 20 Mbit/s a site, 1/2, 1/4, 1/8 of MLPs against full local steps, {_HOLDERS} islands",
        measured=" / ".join(f"{ratio:.2f}x" for ratio in ratios.values()),
        note=(
            f"{told}. Not a run in the lab: losses by step are those of the other rows, on one seed; a step has the "
            f"seconds of a processor that one island of {numel / 1e6:.1f} M parameters takes for 128 tokens (full: "
            f"{step_s[1]:.2f} s, the least of a few by turns), and an exchange its counted bytes "
            f"({max(sent) / 1e6:.2f} MB) at this rate. {_described(bench, _HOLDERS)}"
        ),
    )


def step_seconds(jobs: Sequence[Job], steps: int = 5) -> list[float]:
    """The least seconds of one island's step of each job. Their steps alternate, so all meet the same machine."""
    models = []
    for job in jobs:
        model = job.shape.build(job.length, seed=0, device=job.device)
        if job.slices > 1:
            laconic.partial_updates(model, slice_index=0, num_slices=job.slices, include=job.include)
        models.append((model, adamw_of(model, job)))
    clock = time.process_time if jobs[0].device == "cpu" else time.perf_counter
    found: list[list[float]] = [[] for _ in jobs]
    for _ in range(steps):
        for job, (model, optimizer), own in zip(jobs, models, found, strict=True):
            rows = torch.zeros(job.rows, job.length, dtype=torch.long, device=job.device)
            began = clock()
            model(input_ids=rows, labels=rows).loss.backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if job.device != "cpu":
                torch.cuda.synchronize()
            own.append(clock() - began)
    return [min(own[1:]) for own in found]  # the first one makes the states
