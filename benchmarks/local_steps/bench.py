"""The jobs that the rows share, and how they run: on ranks of this machine, or in the lab."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.local_steps.islands import Answer, Job, Shape, run_jobs
from benchmarks.local_steps.stacked import run_stacked
from laconic.compare.runner import explain_failure
from laconic.lab import Lab
from tests.support.launch import launch
from tests.support.measure import Benchmark

NUM_ISLANDS = 4
_TIMEOUT_S = 3 * 3600.0
_TINY = Shape(hidden=32, intermediate=64, layers=8)
_WARM_STEPS = 880
"""The number of steps of every-step data parallel before all runs: [Note: Equal tokens]."""
_LOSS_STEPS = 320
EVERY = 16
"""The steps between syncs, for twenty syncs in a run: the outer momentum needs about ten."""
_LOSS_SHAPE = Shape(layers=5)
TOP_K = {"codec": "top64", "error_feedback": 0.95, "every": 32, "outer_lr": 1.0, "outer_momentum": 0.0}
"""SparseLoCo's outer optimizer and its decay of the feedback (arXiv 2508.15706)."""
LOSSES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "diloco int4": {"codec": "int4"},
    "streamed int4": {"codec": "int4", "fragments": 4, "overlap": 2},
    "top64": TOP_K,
}
"""The runs whose losses are compared. Those of slices are in slices.py."""
OUTER_MOMENTUM = 0.8
"""With 0.9, old pseudo-gradients, from a higher learning rate, would still weigh too much after twenty syncs."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the rows about slices: their model and their runs."""

    shape: Shape
    job: Mapping[str, Any]
    """Fields of the jobs."""
    seeds: int


SIZES = {
    "tiny": Size(
        shape=Shape(hidden=16, intermediate=32, layers=2, heads=8),
        job={"rows": 1, "length": 16, "warm_steps": 4, "steps": 8, "every": 4, "fragments": 2, "eval_rows": 16},
        seeds=2,
    ),
    "small": Size(
        shape=Shape(hidden=64, intermediate=176, layers=2, heads=8),
        job={
            "rows": 1, "length": 64, "lr": 3e-3, "warm_steps": 300, "steps": 288, "every": 12, "fragments": 2,
            "eval_rows": 512,
        },
        seeds=2,
    ),
    "full": Size(
        shape=Shape(hidden=384, intermediate=1024, layers=6, heads=8),
        job={
            "rows": 8, "length": 256, "lr": 1e-3, "warm_steps": 2000, "steps": 2000, "every": 48, "fragments": 3,
            "eval_rows": 512,
        },
        seeds=5,
    ),
}  # fmt: skip
"""By the name for `--size`: 0.13 M parameters, for two cores; 10.8 M, as the claim wants, for a GPU or many cores."""


class Bench:
    """The answers of all jobs; each job runs once, when a row first needs it, and a file keeps its answer."""

    def __init__(
        self, folder: Path, *, quick: bool, size: str = "small", seeds: int | None = None, device: str = "cpu"
    ) -> None:
        self.folder, self.quick = folder, quick
        self.size, self.device = SIZES["tiny" if quick else size], device
        self.slice_seeds = self.size.seeds if seeds is None or quick else seeds
        """The seeds of the rows about slices."""
        self.shape = _TINY if quick else Shape()
        self.seeds = 1 if quick else 3
        self.loss_steps = 40 if quick else _LOSS_STEPS
        self.warm_steps = 20 if quick else _WARM_STEPS
        self.answers: dict[str, Answer] = {}
        """The answers of the jobs of `LOSSES`, by "name/seed"."""

    def losses(self, name: str) -> list[float]:
        """Return the final loss of one of `LOSSES`, by seed."""
        return [answer.evaluations[-1][-1] for answer in self.by_seed(name)]

    def by_seed(self, name: str) -> list[Answer]:
        """Return the answers of one of `LOSSES`, by seed."""
        jobs = [
            Job(
                name=f"{name}/{seed}", seed=seed, steps=self.loss_steps, warm_steps=self.warm_steps,
                shape=_TINY if self.quick else _LOSS_SHAPE, eval_every=self.loss_steps // 8,
                **{"every": EVERY, "outer_momentum": OUTER_MOMENTUM, **LOSSES[name]},
            )
            for seed in range(self.seeds)
        ]  # fmt: skip
        for job in jobs:
            if job.name not in self.answers:
                self.answers[job.name] = self._answer(job)
        return [self.answers[job.name] for job in jobs]

    def _answer(self, job: Job, *, is_stack: bool = False) -> Answer:
        kept = self.folder / f"answer-{hashlib.sha256(repr(job).encode()).hexdigest()[:16]}.json"
        if not kept.exists():
            tokens = str(self.folder / "tokens")
            if is_stack:
                found = run_stacked(tokens, job)
            else:
                options: dict[str, Any] = {"num_ranks": job.islands, "num_local": 1, "timeout_s": _TIMEOUT_S}
                (found, *_), *_ = launch(run_jobs, tokens, [job], **options)
            kept.write_text(json.dumps(dataclasses.asdict(found)))
        return Answer(**json.loads(kept.read_text()))

    def answer_of(self, job: Job) -> Answer:
        """Return the answer of a job of kind `local`; its islands are one stack if this machine lacks the cores."""
        return self._answer(job, is_stack=self.is_stack(job))

    def is_stack(self, job: Job) -> bool:
        """Whether the islands of a job are one stack in one process: see stacked.py."""
        return job.device != "cpu" or len(os.sched_getaffinity(0)) < job.islands

    def run_in_lab(self, jobs: Sequence[Job]) -> list[Answer]:
        """Run jobs in one launch on the lab's nodes, with one island each, and return their answers."""
        given, answers = self.folder / "jobs.json", self.folder / "answers.json"
        given.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
        with Lab(nodes=NUM_ISLANDS) as lab:
            command = ["-m", "benchmarks.local_steps.islands", str(given), str(answers), str(self.folder / "tokens")]
            outcome = lab.run(command, local=1, timeout_s=_TIMEOUT_S, show=False)
        if outcome.exit_code:
            raise RuntimeError(f"the lab's run failed: {explain_failure(outcome)}")
        return [Answer(**answer) for answer in json.loads(answers.read_text())]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="small", help="of the rows about slices; default: small")
    parser.add_argument("--seeds", type=int, help="of the rows about slices; default: those of the size")
    parser.add_argument("--device", default="cpu", help="of the models of the rows about slices; default: cpu")


BENCHMARK = Benchmark(
    measures=("laconic.codec", "laconic.islands", "laconic.partial", "laconic.shard"),
    name="local_steps",
    prepare=lambda options: Bench(
        options.out, quick=options.quick, size=options.size, seeds=options.seeds, device=options.device
    ),
    add_options=_add_options,
)
