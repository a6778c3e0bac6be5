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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.llama import Llama
from laconic.comm.launch import ExitWithoutTeardown
from laconic.config import DataConfig, OptimizerConfig
from laconic.data import tokens as data
from laconic.data.batches import Division, drawn_offsets
from laconic.lab.counters import interface_bytes
from laconic.models.tokenizer import load_tokenizer
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
    """The number of steps of every-step data parallel before the job. These steps run once for all jobs, and do not
    count. Then the schedule of the learning rate continues, and the optimizer begins with empty states."""
    schedule_steps: int = 0
    """The steps of the learning rate's schedule, warm steps included; 0: the schedule ends with the job."""
    rows: int = 4
    """The rows of an island in a step."""
    length: int = 128
    """The tokens of a row."""
    shape: Shape = Shape()
    lr: float = 2e-3
    warmup_steps: int = 20
    every: int = 20
    fragments: int = 1
    overlap: int = 0
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

    @property
    def start(self) -> Job:
        """The job that trains the weights with which this one begins."""
        shared = {name: getattr(self, name) for name in ("seed", "rows", "length", "lr", "shape", "warmup_steps")}
        whole = self.warm_steps + self.steps
        return Job(name="warm", kind="ddp", steps=self.warm_steps, schedule_steps=whole, **shared)

    def lr_of(self, step: int) -> float:
        """Return the inner learning rate in a step of the job, from 0."""
        schedule = OptimizerConfig(lr=self.lr, warmup_steps=self.warmup_steps, lr_schedule="cosine")
        total = self.schedule_steps or self.warm_steps + self.steps
        lr = lr_at(self.warm_steps + step, schedule, total_steps=total)
        # after warm steps the states of the optimizer are empty, so warm up again
        return lr * min(1.0, (step + 1) / self.warmup_steps) if self.warm_steps else lr


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a job, the same on all ranks."""

    num_parameters: int
    evaluations: list[tuple[int, float]]
    """(step, loss of the outer parameters on the held-out rows) of each evaluation."""
    sent_bytes: list[int]
    """By step: the bytes that this rank sent in the exchanges whose means it applied after the step."""
    wire_bytes: list[int]
    """By step: the bytes that this node sent at the lab's interface; empty without a lab."""


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
        start = job.start
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

    def rows_of(self, job: Job, step: int) -> Tensor:
        """Return this island's rows in a step, (rows, length). Those of all islands are one global batch."""
        division = Division(num_workers=self.count, micro_batch_size=job.rows)
        num_starts = len(self.tokens.train) - job.length + 1
        offsets = drawn_offsets(division, job.warm_steps + step, seed=job.seed, num_starts=num_starts)
        return torch.from_numpy(data.rows_at(self.tokens.train, offsets[0, self.rank], job.length))

    def held_rows(self, job: Job) -> Tensor:
        """Return this island's part of the held-out rows, (rows, length), the same every time."""
        spread = len(self.tokens.evaluation) - job.length
        starts = torch.arange(self.rank, job.eval_rows, self.count) * spread // job.eval_rows
        return torch.from_numpy(data.rows_at(self.tokens.evaluation, starts.numpy(), job.length))


def open_corpus(folder: Path, length: int) -> data.TokenFiles:
    """Return the tokens of the trainer's corpus for rows of `length`; make their files if they are not there."""
    config = DataConfig(sequence_length=length)
    return data.open_tokens(data.prepare(config, load_tokenizer(config.tokenizer), folder), config)


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
    wrapped, local = model, None
    if job.kind == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        local = laconic.LocalSteps(
            model, optimizer, mesh=islands.mesh, every=job.every, fragments=job.fragments, overlap=job.overlap,
            codec=job.codec, error_feedback=job.error_feedback,
            outer=laconic.OuterSGD(
                lr=job.outer_lr, momentum=job.outer_momentum, sliced_lr=job.sliced_lr,
                sliced_momentum=job.sliced_momentum,
            ),
        )  # fmt: skip
    steps = _Steps(job, islands)
    evaluations = [(0, _evaluate(model, local, job, islands))]
    for step in steps.run(model, wrapped, optimizer, local):
        if step == job.steps or (job.eval_every and step % job.eval_every == 0):
            evaluations.append((step, _evaluate(model, local, job, islands)))
    return Answer(
        num_parameters=num_parameters, evaluations=evaluations, sent_bytes=steps.sent, wire_bytes=steps.wire
    )  # fmt: skip


def _adamw(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)]
    return torch.optim.AdamW(decays, lr=job.lr, betas=BETAS, fused=True)


class _Steps:
    """The training steps of a job, and the bytes that they send."""

    def __init__(self, job: Job, islands: _Islands) -> None:
        self._job, self._islands = job, islands
        self.sent: list[int] = []
        self.wire: list[int] = []

    def run(
        self, model: nn.Module, wrapped: nn.Module, optimizer: torch.optim.Optimizer, local: laconic.LocalSteps | None
    ) -> Iterator[int]:
        """Take the steps, and yield the number of steps after each."""
        job = self._job
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(job.steps):
            rows = self._islands.rows_of(job, step)
            for group in optimizer.param_groups:
                group["lr"] = job.lr_of(step)
            before = interface_bytes()
            wrapped(input_ids=rows, labels=rows).loss.backward()
            nn.utils.clip_grad_norm_(trained, MAX_NORM)
            if local is None:
                optimizer.step()
            else:
                local.step()
            optimizer.zero_grad()
            if step + 1 == job.steps and local is not None:
                local.finish()
            after = interface_bytes()
            if before is not None and after is not None:
                self.wire.append(after.sent - before.sent)
            self.sent.append(sum(report.sent_bytes for report in local.reports) if local is not None else 0)
            yield step + 1


@torch.no_grad()
def _evaluate(model: nn.Module, local: laconic.LocalSteps | None, job: Job, islands: _Islands) -> float:
    """The mean loss of the outer parameters on held-out rows, the same every time. Each rank evaluates its part."""
    if local is not None:
        with local.outer_parameters():
            return _evaluate(model, None, job, islands)
    total, count = 0.0, 0
    for rows in islands.held_rows(job).split(_EVAL_ROWS_AT_ONCE):
        total += float(model(input_ids=rows, labels=rows).loss) * len(rows)  # type: ignore[operator]
        count += len(rows)
    sums = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(sums)
    assert math.isfinite(float(sums[0]))
    return float(sums[0] / sums[1])


def main() -> None:
    given, answers, folder = (Path(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    jobs = [Job(**{**job, "shape": Shape(**job["shape"])}) for job in json.loads(given.read_text())]
    found = run_jobs(str(folder), jobs)
    if dist.get_rank() == 0:
        answers.write_text(json.dumps([dataclasses.asdict(answer) for answer in found]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    process_exit = ExitWithoutTeardown()
    main()
    process_exit.code = 0
