"""benchmarks.local_steps: its islands in one process against those on ranks, and what it computes from runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.local_steps import batched, losses, traffic
from benchmarks.local_steps.islands import Answer, Job, Shape, run_jobs
from benchmarks.local_steps.partial import step_cost
from tests.support.launch import run_ranks

TINY = Shape(hidden=16, intermediate=32, layers=2, heads=2)


def test_seconds_to_a_loss_are_those_of_the_first_evaluation_that_is_as_good() -> None:
    rest: dict[str, Any] = {"num_parameters": 1, "step_s": [], "sent_bytes": [], "wire_bytes": None, "reports": []}
    found = Answer(evaluations=[(10 * i, 0.5 * i, loss) for i, loss in enumerate((3.0, 2.0, 1.0, 1.5))], **rest)
    assert traffic.seconds_to(found, 2.0) == (0.5, 10)
    assert traffic.seconds_to(found, 0.5) == (math.inf, 30)
    assert losses.excess_over([2.0, 4.0], [1.0, 2.0]) == pytest.approx(1.0)


@pytest.mark.heavy
def test_a_quarter_of_every_layer_saves_what_the_formula_says() -> None:
    """Of a model of 1.3 B parameters: 2 (1 - 1/4) P / (6 P_linear + 12 L d T) for d = 2048, L = 24, T = 1024."""
    full, part = step_cost("gpt2"), step_cost("gpt2", slices=4, include=("mlp", "attention"))
    assert 1 - part.flops / full.flops == pytest.approx(0.2198, abs=1e-3)
    assert part.peak_bytes < 0.6 * full.peak_bytes
    assert part.weights_bytes == full.weights_bytes
    assert part.activations_bytes < full.activations_bytes


STREAMED: dict[str, Any] = {
    "steps": 9, "rows": 2, "length": 16, "shape": TINY, "eval_rows": 8, "codec": "int4", "warm_steps": 3,
    "warm_lr": 2e-3, "every": 4, "fragments": 2, "overlap": 1, "warmup_steps": 2,
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
def test_batched_islands_train_as_islands_on_ranks_do(tmp_path: Path) -> None:
    """Streamed in two fragments, in four bits, with slices and without, sparsely, or in every step: equal losses."""
    expected = [answer.evaluations[-1][2] for answer in run_ranks(streamed_jobs, 4, str(tmp_path), local=1)[0]]
    trainer = batched.Batched(tmp_path, 16, torch.device("cpu"))
    whole = batched.BatchedJob(**STREAMED, islands=4)
    found = [trainer.train(dataclasses.replace(whole, **change)) for change in CHANGES.values()]
    assert found == pytest.approx(expected, rel=2e-5)
    for one, other in itertools.combinations(expected, 2):
        assert abs(one - other) > 1e-4 * one, "each change makes a difference that this could miss"


def matrix_job(steps: int, **changes: Any) -> batched.BatchedJob:
    shared: dict[str, Any] = {"rows": 2, "length": 16, "shape": TINY, "eval_rows": 8, "warmup_steps": 2, "every": 2}
    return batched.BatchedJob(**shared, steps=steps, islands=4, **changes)


def test_slow_islands_take_fewer_steps_and_weigh_less(tmp_path: Path) -> None:
    trainer = batched.Batched(tmp_path, 16, torch.device("cpu"))
    equal = matrix_job(6)
    assert trainer.train(dataclasses.replace(equal, speeds=(1.0,) * 4)) == pytest.approx(trainer.train(equal), rel=1e-6)
    slow = dataclasses.replace(equal, speeds=(1.0, 1.0, 0.5, 0.5))
    assert slow.tokens == 0.75 * equal.tokens
    assert abs(trainer.train(slow) - trainer.train(equal)) > 1e-4
