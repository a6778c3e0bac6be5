"""benchmarks.local_steps: its islands learn, and what it computes from runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_steps import losses, slices
from benchmarks.local_steps.bench import Bench
from benchmarks.local_steps.islands import Answer, Job, Shape, run_jobs
from benchmarks.local_steps.partial import step_cost
from benchmarks.local_steps.stacked import run_stacked
from laconic.rehearse import ranks
from tests.support.launch import run_ranks

TINY = Shape(hidden=16, intermediate=32, layers=2, heads=2)


def test_the_excess_is_that_of_means_and_a_curve_has_the_mean_of_its_seeds() -> None:
    assert losses.excess_over([2.0, 4.0], [1.0, 2.0]) == pytest.approx(1.0)
    curves = {"a/0": [(0, 4.0), (8, 2.0)], "a/1": [(0, 4.0), (8, 3.0)], "b/0": [(0, 1.0)]}
    assert losses.mean_curve(curves, "a") == {0: 4.0, 8: 2.5}


def test_an_island_waits_for_what_the_wire_has_not_brought() -> None:
    """Of 1,000 bits a second: 250 bytes take two seconds, of which one step is the overlap."""
    job = Job(name="", steps=6, every=2, overlap=1)
    ends = slices.seconds_by_step(job, [0, 0, 250, 0, 25, 0], step_s=1.0, bits_per_s=1000.0)
    assert ends == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    exact = slices.seconds_by_step(replace(job, overlap=0), [0, 250, 0, 0, 0, 0], step_s=1.0, bits_per_s=1000.0)
    assert exact == [1.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_the_time_to_a_loss_lies_between_the_evaluations_around_it() -> None:
    answer = Answer(num_parameters=1, evaluations=[(0, 4.0), (2, 3.0), (4, 2.0)], sent_bytes=[], wire_bytes=[])
    assert slices.time_to(2.5, answer, [1.0, 2.0, 4.0, 6.0]) == 4.0
    assert slices.time_to(4.0, answer, [1.0, 2.0, 4.0, 6.0]) == 0.0
    assert slices.time_to(1.0, answer, [1.0, 2.0, 4.0, 6.0]) == float("inf")


SHORT: dict[str, Any] = {
    "islands": 4, "shape": Shape(hidden=16, intermediate=32, layers=2, heads=8), "rows": 2, "length": 16, "steps": 9,
    "every": 4, "fragments": 2, "overlap": 1, "eval_rows": 16, "warmup_steps": 2, "eval_every": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"warm_steps": 3},
        {"slices": 2, "outer_lr": 0.5},
        {"slices": 4, "include": ("mlp", "attention"), "sliced_lr": 0.6, "sliced_momentum": 0.0},
        {"slices": 2, "codec": "int4"},
    ],
    ids=["whole", "slices", "heads", "coded"],
)
def test_a_stack_of_islands_learns_as_ranks_do(change: dict[str, Any], tmp_path: Path) -> None:
    """The stack codes a mean in one piece, and islands in their parts, so four bits round a little otherwise."""
    job = Job(name="", **{**SHORT, **change})
    ((wanted, *_), *_) = ranks(run_jobs, str(tmp_path / "ranks"), [job], nodes=4)
    found = run_stacked(str(tmp_path / "stack"), job)
    assert (found.num_parameters, found.sent_bytes) == (wanted.num_parameters, wanted.sent_bytes)
    for (step, loss), (at, want) in zip(found.evaluations, wanted.evaluations, strict=True):
        assert step == at
        assert loss == pytest.approx(want, rel=1e-3 if job.codec == "int4" else 2e-6)
    assert found.evaluations[-1][1] < found.evaluations[0][1] - 0.02


def test_the_excess_has_a_mean_and_an_error_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # so islands are a stack
    bench = Bench(tmp_path, quick=True)
    excess = slices.Excess(bench, islands=2, slices=2)
    assert len(excess.by_seed) == 2
    assert excess.mean == pytest.approx(sum(excess.by_seed) / 2)
    assert excess.error == pytest.approx(abs(excess.by_seed[0] - excess.by_seed[1]) / 2)
    again = slices.Excess(Bench(tmp_path, quick=True), islands=2, slices=2)
    assert again.by_seed == excess.by_seed, "files keep the answers"


@pytest.mark.heavy
def test_quarters_save_what_the_formula_says() -> None:
    """Of a model of 1.3 B parameters: 2 (1 - 1/4) P / (6 P_linear + 12 L d T) for d = 2048, L = 24, T = 1024."""
    full, mlps, part = step_cost(), step_cost(slices=4), step_cost(slices=4, include=("mlp", "attention"))
    assert 1 - mlps.flops / full.flops == pytest.approx(0.1465, abs=1e-3)
    assert 1 - part.flops / full.flops == pytest.approx(0.2198, abs=1e-3)
    assert part.peak_bytes < 0.6 * full.peak_bytes < mlps.peak_bytes < 0.72 * full.peak_bytes
    assert part.weights_bytes == full.weights_bytes
    assert part.activations_bytes < full.activations_bytes


STREAMED: dict[str, Any] = {
    "steps": 9, "rows": 2, "length": 16, "shape": TINY, "eval_rows": 8, "codec": "int4", "warm_steps": 3, "every": 4,
    "fragments": 2, "overlap": 1, "warmup_steps": 2,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "whole": {},
    "sliced": {"slices": 2, "sliced_lr": 0.5, "sliced_momentum": 0.6},
    "sparse": {"codec": "top64", "error_feedback": 0.95},
    "ddp": {"kind": "ddp"},
}


def streamed_jobs(folder: str) -> list[Answer]:
    return run_jobs(folder, [Job(name=name, **{**STREAMED, **change}) for name, change in CHANGES.items()])


@pytest.mark.machine  # the first steps are those of DDP
def test_jobs_begin_alike_and_each_change_makes_a_difference(tmp_path: Path) -> None:
    answers = run_ranks(streamed_jobs, 4, str(tmp_path), local=1)[0]
    begin, end = ([answer.evaluations[place][1] for answer in answers] for place in (0, -1))
    assert len(set(begin)) == 1
    assert max(end) < begin[0]
    assert len({round(loss, 4) for loss in end}) == len(CHANGES)
    assert [sum(answer.sent_bytes) > 0 for answer in answers] == [True, True, True, False]
