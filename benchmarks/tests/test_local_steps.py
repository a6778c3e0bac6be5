"""benchmarks.local_steps: its islands learn, and what it computes from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_steps import losses
from benchmarks.local_steps.islands import Answer, Job, Shape, run_jobs
from benchmarks.local_steps.partial import step_cost
from tests.support.launch import run_ranks

TINY = Shape(hidden=16, intermediate=32, layers=2, heads=2)


def test_the_excess_is_that_of_means_and_a_curve_has_the_mean_of_its_seeds() -> None:
    assert losses.excess_over([2.0, 4.0], [1.0, 2.0]) == pytest.approx(1.0)
    curves = {"a/0": [(0, 4.0), (8, 2.0)], "a/1": [(0, 4.0), (8, 3.0)], "b/0": [(0, 1.0)]}
    assert losses.mean_curve(curves, "a") == {0: 4.0, 8: 2.5}


@pytest.mark.heavy
def test_a_quarter_of_every_layer_saves_what_the_formula_says() -> None:
    """Of a model of 1.3 B parameters: 2 (1 - 1/4) P / (6 P_linear + 12 L d T) for d = 2048, L = 24, T = 1024."""
    full, part = step_cost(), step_cost(slices=4)
    assert 1 - part.flops / full.flops == pytest.approx(0.2198, abs=1e-3)
    assert part.peak_bytes < 0.6 * full.peak_bytes
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
