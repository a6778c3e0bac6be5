"""benchmarks.local_steps: computations on the results of runs, and its jobs on a tiny model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.local_steps import batched, losses, traffic
from benchmarks.local_steps.islands import Answer, Job, Shape, held_rows, lr_of, read_jobs, run_jobs, write_jobs
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

TINY = Shape(hidden=16, intermediate=32, layers=2, heads=2)


def answer(eval_losses: list[float], **rest: Any) -> Answer:
    fields: dict[str, Any] = {"num_parameters": 1, "step_s": [], "sent_bytes": [], "wire_bytes": None, "reports": []}
    return Answer(evaluations=[(10 * i, 0.5 * i, loss) for i, loss in enumerate(eval_losses)], **(fields | rest))


def test_seconds_to_a_loss_are_those_of_the_first_evaluation_that_is_as_good() -> None:
    assert traffic.seconds_to(answer([3.0, 2.0, 1.0, 1.5]), 2.0) == (0.5, 10)
    assert traffic.seconds_to(answer([3.0, 2.5]), 2.0) == (math.inf, 10)


def test_excess_is_of_the_means() -> None:
    assert losses.excess_over([2.0, 4.0], [1.0, 2.0]) == pytest.approx(1.0)


def test_curves_are_means_over_seeds() -> None:
    curves = {"a/0": [(0, 0.0, 1.0), (5, 1.0, 3.0)], "a/1": [(0, 0.0, 2.0), (5, 1.0, 5.0)], "b/0": [(0, 0.0, 9.0)]}
    assert losses.mean_curve(curves, "a") == {0: 1.5, 5: 4.0}


def test_jobs_survive_their_file(tmp_path: Path) -> None:
    jobs = [Job(name="a", steps=3, shape=TINY), Job(name="b", kind="ddp", steps=4, codec="e3m0", every=2)]
    write_jobs(jobs, tmp_path / "jobs.json")
    assert read_jobs(tmp_path / "jobs.json") == jobs


def job_pair(folder: str) -> list[Answer]:
    common: dict[str, Any] = {"steps": 4, "rows": 1, "length": 16, "shape": TINY, "eval_rows": 4, "eval_every": 2}
    ddp = Job(name="ddp", kind="ddp", warm_steps=2, **common)
    alike = dataclasses.replace(ddp, name="again")
    local = Job(name="local", every=2, codec="int8", warm_steps=2, **common)
    return run_jobs(folder, [ddp, alike, local])


def test_jobs_begin_alike_and_report_their_syncs(tmp_path: Path) -> None:
    ddp, again, local = run_ranks(job_pair, 2, str(tmp_path), local=1)[0]
    assert [step for step, _, _ in ddp.evaluations] == [0, 2, 4]
    by_job = [[loss for _, _, loss in found.evaluations] for found in (ddp, again, local)]
    assert by_job[0] == by_job[1], "nothing depends on what ran before"
    assert by_job[0][0] == by_job[2][0] != by_job[2][2] != by_job[0][2]
    assert [sent > 0 for sent in local.sent_bytes] == [False, True, False, True]
    assert ddp.reports == []
    assert len(local.reports) == 2
    assert len(list(tmp_path.glob("warm-*.pt"))) == 1


STREAMED: dict[str, Any] = {
    "steps": 9, "rows": 2, "length": 16, "shape": TINY, "eval_rows": 8, "codec": "int4", "warm_steps": 3,
    "warm_lr": 2e-3, "every": 4, "fragments": 2, "overlap": 1, "warmup_steps": 2,
}  # fmt: skip
_SLICED: dict[str, Any] = {"slices": 2, "sliced_lr": 0.5, "sliced_momentum": 0.6}


_FED_BACK: dict[str, Any] = {"codec": "top64", "error_feedback": 0.95}
_EVERY_STEP: dict[str, Any] = {"kind": "ddp"}
CHANGES: dict[str, dict[str, Any]] = {"whole": {}, "sliced": _SLICED, "sparse": _FED_BACK, "ddp": _EVERY_STEP}


def streamed_jobs(folder: str) -> list[Answer]:
    return run_jobs(folder, [Job(name=name, **{**STREAMED, **change}) for name, change in CHANGES.items()])


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


def test_muon_inside_is_torchs(tmp_path: Path) -> None:
    """Four steps of data parallel, beside torch.optim.Muon for the matrices of layers and AdamW for the others."""
    job = matrix_job(4, kind="ddp", inner="muon")
    trainer = batched.Batched(tmp_path, 16, torch.device("cpu"))
    model = job.shape.build(job.length, seed=job.seed)
    parameters = dict(model.named_parameters())
    matrices = {name for name in parameters if ".layers." in name and parameters[name].dim() == 2}
    muon = torch.optim.Muon(
        [parameters[name] for name in matrices], lr=job.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    others = [parameter for name, parameter in parameters.items() if name not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(job.steps):
        rows = trainer._rows(job, step, job.islands).flatten(0, 1)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = lr_of(job, step)
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        muon.step()
        adamw.step()
        model.zero_grad()
    held = held_rows(job, trainer._tokens)
    with torch.no_grad():
        expected = float(model(input_ids=held, labels=held).loss)
    assert trainer.train(job) == pytest.approx(expected, rel=1e-4)
    assert abs(trainer.train(dataclasses.replace(job, inner="adamw")) - expected) > 1e-3 * expected


def test_slow_islands_take_fewer_steps_and_weigh_less(tmp_path: Path) -> None:
    trainer = batched.Batched(tmp_path, 16, torch.device("cpu"))
    equal = matrix_job(6)
    assert trainer.train(dataclasses.replace(equal, speeds=(1.0,) * 4)) == pytest.approx(trainer.train(equal), rel=1e-6)
    slow = dataclasses.replace(equal, speeds=(1.0, 1.0, 0.5, 0.5))
    assert slow.tokens == 0.75 * equal.tokens
    assert abs(trainer.train(slow) - trainer.train(equal)) > 1e-4
    values = {"w": torch.zeros(2, 3, requires_grad=True)}
    inner = batched.Inner(values, set(), {}, 1.0, TINY, speeds=(1.0, 0.5))
    for _ in range(4):
        before = inner._kept()
        with torch.no_grad():
            values["w"].add_(1.0)
            inner._undo(before)
    assert values["w"].detach().tolist() == [[4.0] * 3, [2.0] * 3]
