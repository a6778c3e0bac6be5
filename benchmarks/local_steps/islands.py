"""Training jobs of several islands, with one rank each, on the trainer's corpus.

    laconic lab --nodes 4 -- -m benchmarks.local_steps.islands JOBS.json ANSWERS.json TOKENS

Rank 0 writes the answers of all jobs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.llama import Llama
from laconic.comm.launch import ExitWithoutTeardown
from laconic.config import DataConfig, OptimizerConfig
from laconic.data import tokens as data
from laconic.data.batches import Sampler
from laconic.hf.tokenizer import load_tokenizer
from laconic.lab.counters import interface_bytes
from laconic.strategies.optimizers import lr_at

_VOCAB = 256
_EVAL_ROWS_AT_ONCE = 16
DECAY, BETAS, MAX_NORM = 0.1, (0.9, 0.95), 1.0
"""The inner optimizer: the weight decay of matrices, AdamW's betas, and the norm at which gradients are clipped."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama over bytes."""

    hidden: int = 128
    intermediate: int = 352
    layers: int = 8
    heads: int = 4

    def build(self, length: int, *, seed: int, device: str = "cpu") -> nn.Module:
        """Build the model; equal seeds and devices give equal weights."""
        llama = Llama(**dataclasses.asdict(self), kv_heads=self.heads, vocab=_VOCAB, batch=1, sequence=length)
        return llama.build(torch.device(device), torch.float32, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of all islands."""

    name: str
    kind: Literal["ddp", "local"] = "local"
    """`ddp`: PyTorch's DistributedDataParallel over all islands, every step."""
    seed: int = 0
    """The seed of weights and rows."""
    steps: int
    warm_steps: int = 0
    """The number of steps of every-step data parallel at `warm_lr` before the job. These steps run once for all jobs,
    and do not count. Then the schedule of the learning rate continues, and the optimizer begins with empty states."""
    warm_lr: float = 2e-3
    schedule_steps: int = 0
    """The steps of the learning rate's schedule, warm steps included; 0: the schedule ends with the job."""
    rows: int = 4
    """The rows of an island in a step."""
    length: int = 128
    """The tokens of a row."""
    shape: Shape = Shape()
    lr: float = 2e-3
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 20
    every: int = 20
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    codec: str = "fp32"
    error_feedback: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    sliced_lr: float | None = None
    """The outer learning rate of slices; None: as of all other parameters."""
    sliced_momentum: float | None = None
    slices: int = 1
    eval_every: int = 0
    """The steps between evaluations; 0: only after the last step."""
    eval_rows: int = 256


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a job. It is the same on all ranks except for times."""

    num_parameters: int
    evaluations: list[tuple[int, float, float]]
    """(step, seconds of training before, loss of the outer parameters on the held-out rows) of each evaluation."""
    step_s: list[float]
    """The seconds of each step."""
    sent_bytes: list[int]
    """By step: the bytes that this rank sent in the exchanges whose means it applied after the step."""
    wire_bytes: list[int] | None
    """By step: the bytes that this node sent at the lab's interface; None without a lab."""
    reports: list[dict[str, float]]
    """The reports of all syncs."""


class _Islands:
    """The mesh and the tokens, which all jobs share."""

    def __init__(self, folder: Path, length: int) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.mesh = laconic.init_mesh("cpu", islands=self.count, local=1)
        if self.rank == 0:
            open_corpus(folder, length)
        dist.barrier()
        self.tokens = open_corpus(folder, length)
        self._folder = folder

    def warm(self, job: Job, model: nn.Module) -> None:
        """Load the weights with which the job begins. A file keeps these weights for other jobs and later launches."""
        start = start_of(job)
        name = hashlib.sha256(repr(start).encode()).hexdigest()[:16]
        file = self._folder / f"warm-{name}.pt"
        if not file.exists():  # all ranks agree, because rank 0 writes the file between two barriers
            wrapped = DistributedDataParallel(model)
            for _ in _Steps(start, self).run(model, wrapped, _adamw(model, start), None):
                pass
            dist.barrier()
            if self.rank == 0:
                torch.save(model.state_dict(), file)
            dist.barrier()
        model.load_state_dict(torch.load(file, weights_only=True))


def open_corpus(folder: Path, length: int) -> data.TokenFiles:
    """Return the tokens of the trainer's corpus for rows of `length`; make their files if they are not there."""
    config = DataConfig(sequence_length=length)
    return data.open_tokens(data.prepare(config, load_tokenizer(config.tokenizer), folder), config)


def start_of(job: Job) -> Job:
    """Return the job that trains the weights with which `job` begins."""
    return Job(
        name="warm", kind="ddp", seed=job.seed, steps=job.warm_steps, rows=job.rows, length=job.length,
        lr=job.warm_lr, shape=job.shape, lr_schedule=job.lr_schedule, warmup_steps=job.warmup_steps,
        schedule_steps=_schedule_steps(job),
    )  # fmt: skip


def run_jobs(folder: str, jobs: Sequence[Job]) -> list[Answer]:
    """Run jobs one after the other on all ranks; every rank is an island."""
    torch.set_num_threads(1)  # the launcher does this already, but the lab does not
    islands = _Islands(Path(folder), max(job.length for job in jobs))
    return [_run(job, islands) for job in jobs]


def _run(job: Job, islands: _Islands) -> Answer:
    model = job.shape.build(job.length, seed=job.seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if job.warm_steps:
        islands.warm(job, model)
    if job.slices > 1:
        laconic.partial_updates(model, slice_index=islands.rank % job.slices, num_slices=job.slices)
    optimizer = _adamw(model, job)
    wrapped: nn.Module = model
    local = None
    if job.kind == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        local = laconic.LocalSteps(
            model,
            optimizer,
            mesh=islands.mesh,
            every=job.every,
            fragments=job.fragments,
            overlap=job.overlap,
            mixing=job.mixing,
            codec=job.codec,
            error_feedback=job.error_feedback,
            outer=laconic.OuterSGD(
                lr=job.outer_lr,
                momentum=job.outer_momentum,
                sliced_lr=job.sliced_lr,
                sliced_momentum=job.sliced_momentum,
            ),
        )
    steps = _Steps(job, islands)
    evaluations = [(0, 0.0, _evaluate(model, local, job, islands))]
    for step in steps.run(model, wrapped, optimizer, local):
        if step == job.steps or (job.eval_every and step % job.eval_every == 0):
            evaluations.append((step, sum(steps.times), _evaluate(model, local, job, islands)))
    return Answer(
        num_parameters=num_parameters,
        evaluations=evaluations,
        step_s=steps.times,
        sent_bytes=steps.sent,
        wire_bytes=steps.wire or None,
        reports=steps.reports,
    )


def _adamw(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)]
    return torch.optim.AdamW(decays, lr=job.lr, betas=BETAS, fused=True)


class _Steps:
    """The training steps of a job, and their measurements."""

    def __init__(self, job: Job, islands: _Islands) -> None:
        self._job, self._islands = job, islands
        self.times: list[float] = []
        self.sent: list[int] = []
        self.wire: list[int] = []
        self.reports: list[dict[str, float]] = []

    def run(
        self, model: nn.Module, wrapped: nn.Module, optimizer: torch.optim.Optimizer, local: laconic.LocalSteps | None
    ) -> Iterator[int]:
        """Take the steps, and yield the number of steps after each."""
        job = self._job
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(job.steps):
            islands = self._islands
            rows = rows_of(job, islands.tokens, step, island=islands.rank, islands=islands.count)
            lr = lr_of(job, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            before, start_s = interface_bytes(), time.perf_counter()
            wrapped(input_ids=rows, labels=rows).loss.backward()
            nn.utils.clip_grad_norm_(trained, MAX_NORM)
            if local is None:
                optimizer.step()
            else:
                local.step()
            optimizer.zero_grad()
            if step + 1 == job.steps and local is not None:
                local.finish()
            self.times.append(time.perf_counter() - start_s)
            after = interface_bytes()
            if before is not None and after is not None:
                self.wire.append(after.sent - before.sent)
            synced = local.reports if local is not None else []
            self.sent.append(sum(report.sent_bytes for report in synced))
            self.reports += [dataclasses.asdict(report) for report in synced]
            yield step + 1


def _schedule_steps(job: Job) -> int:
    return job.schedule_steps or job.warm_steps + job.steps


def lr_of(job: Job, step: int) -> float:
    """Return the inner learning rate in a step of the job, from 0."""
    schedule = OptimizerConfig(lr=job.lr, warmup_steps=job.warmup_steps, lr_schedule=job.lr_schedule)
    lr = lr_at(job.warm_steps + step, schedule, total_steps=_schedule_steps(job))
    # after warm steps the states of the optimizer are empty, so warm up again
    return lr * min(1.0, (step + 1) / job.warmup_steps) if job.warm_steps else lr


def rows_of(job: Job, tokens: data.TokenFiles, step: int, *, island: int, islands: int) -> Tensor:
    """Return the rows of an island in a step of the job, (rows, length). Those of all islands are one global batch."""
    sampler = Sampler(
        seed=job.seed,
        num_tokens=len(tokens.train),
        sequence_length=job.length,
        micro_batch_size=job.rows,
        rank=island,
        world_size=islands,
    )
    return torch.from_numpy(data.rows_at(tokens.train, sampler.offsets(job.warm_steps + step)[0], job.length))


def held_rows(job: Job, tokens: data.TokenFiles, *, island: int = 0, islands: int = 1) -> Tensor:
    """Return an island's part of the held-out rows, (rows, length), the same every time."""
    spread = len(tokens.evaluation) - job.length
    starts = [row * spread // job.eval_rows for row in range(island, job.eval_rows, islands)]
    return torch.from_numpy(
        data.rows_at(tokens.evaluation, torch.tensor(starts, dtype=torch.int64).numpy(), job.length)
    )


@torch.no_grad()
def _evaluate(model: nn.Module, local: laconic.LocalSteps | None, job: Job, islands: _Islands) -> float:
    """The mean loss of the outer parameters on held-out rows, the same every time. Each rank evaluates its part."""
    if local is not None:
        with local.outer_parameters():
            return _evaluate(model, None, job, islands)
    total, count = 0.0, 0
    held = held_rows(job, islands.tokens, island=islands.rank, islands=islands.count)
    for rows in held.split(_EVAL_ROWS_AT_ONCE):
        total += float(model(input_ids=rows, labels=rows).loss) * len(rows)  # type: ignore[operator]
        count += len(rows)
    sums = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(sums)
    assert math.isfinite(float(sums[0]))
    return float(sums[0] / sums[1])


def read_jobs(path: Path) -> list[Job]:
    """Read the file that `write_jobs` wrote."""
    return [Job(**{**job, "shape": Shape(**job["shape"])}) for job in json.loads(path.read_text())]


def write_jobs(jobs: Sequence[Job], path: Path) -> None:
    """Write jobs as JSON."""
    path.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))


def main() -> None:
    jobs, answers, folder = (Path(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    results: list[dict[str, Any]] = [dataclasses.asdict(answer) for answer in run_jobs(str(folder), read_jobs(jobs))]
    if dist.get_rank() == 0:
        answers.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    process_exit = ExitWithoutTeardown()
    main()
    process_exit.code = 0
