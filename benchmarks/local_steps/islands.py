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
from collections.abc import Callable, Collection, Iterator, Sequence
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
from laconic.partial.patterns import Kind
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
        """Build the model; equal seeds give equal weights on every device."""
        llama = Llama(**dataclasses.asdict(self), kv_heads=self.heads, vocab=_VOCAB, batch=1, sequence=length)
        return llama.build(torch.device("cpu"), torch.float32, seed=seed).to(device)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of all islands."""

    name: str
    kind: Literal["ddp", "local"] = "local"
    """`ddp`: PyTorch's DistributedDataParallel over all islands, every step."""
    seed: int = 0
    """The seed of weights and rows."""
    islands: int = 4
    """The number of ranks, of which each is an island."""
    device: str = "cpu"
    """The device of all models; the islands exchange tensors on the host."""
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
    """The outer learning rate of slices; None: the default, by their holders."""
    sliced_momentum: float | None = None
    slices: int = 1
    include: Collection[Kind] = ("mlp",)
    """The kinds of layers in slices."""
    eval_every: int = 0
    """The steps between evaluations; 0: only after the last step."""
    eval_rows: int = 256

    @property
    def start(self) -> Job:
        """The job that trains the weights with which this one begins."""
        names = "seed", "islands", "device", "rows", "length", "lr", "shape", "warmup_steps"
        shared = {name: getattr(self, name) for name in names}
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


class Rows:
    """The tokens that all jobs share, and what a folder keeps for them."""

    def __init__(self, folder: Path, job: Job) -> None:
        """Open the tokens for rows as long as the job's, or make them."""
        self.tokens = open_corpus(folder, job.length)
        self._folder = folder

    def of_all(self, job: Job, step: int) -> Tensor:
        """Return the rows of all islands in a step, (islands, rows, length): one global batch."""
        division = Division(num_workers=job.islands, micro_batch_size=job.rows)
        num_starts = len(self.tokens.train) - job.length + 1
        offsets = drawn_offsets(division, job.warm_steps + step, seed=job.seed, num_starts=num_starts)
        rows = [torch.from_numpy(data.rows_at(self.tokens.train, own, job.length)) for own in offsets[0]]
        return torch.stack(rows).to(job.device)

    def held(self, job: Job) -> Tensor:
        """Return the held-out rows, (rows, length), the same every time."""
        spread = len(self.tokens.evaluation) - job.length
        starts = torch.arange(job.eval_rows) * spread // job.eval_rows
        return torch.from_numpy(data.rows_at(self.tokens.evaluation, starts.numpy(), job.length)).to(job.device)

    def keep(self, start: Job, model: nn.Module, train: Callable[[], None]) -> None:
        """Load the weights with which jobs begin. A file keeps them for other jobs and later launches.

        `train` trains the model by the job `start`, if there is no file; all ranks call it.
        """
        file = self._folder / f"warm-{hashlib.sha256(repr(start).encode()).hexdigest()[:16]}.pt"
        if not file.exists():  # all ranks agree, because rank 0 writes the file between two barriers
            train()
            _wait_for_all()
            if not dist.is_initialized() or dist.get_rank() == 0:
                torch.save(model.state_dict(), file)
            _wait_for_all()
        model.load_state_dict(torch.load(file, weights_only=True, map_location=start.device))


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


class _Islands:
    """The mesh and the rows of islands that are ranks."""

    def __init__(self, folder: Path, job: Job) -> None:
        if not dist.is_initialized():  # on threads; launchers of processes have done it
            dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        assert self.count == job.islands, f"{self.count} ranks for {job.islands} islands"
        self.mesh = laconic.init_mesh("cpu", islands=self.count, local=1)
        if self.rank == 0:
            open_corpus(folder, job.length)
        dist.barrier()
        self.rows = Rows(folder, job)

    def warm(self, job: Job, model: nn.Module) -> None:
        """Load the weights with which the job begins."""

        def train() -> None:
            for _ in _Steps(job.start, self, averages=True).run(model, model, adamw_of(model, job.start), None):
                pass

        self.rows.keep(job.start, model, train)

    def rows_of(self, job: Job, step: int) -> Tensor:
        """Return this island's rows in a step, (rows, length)."""
        return self.rows.of_all(job, step)[self.rank]

    def held_rows(self, job: Job) -> Tensor:
        """Return this island's part of the held-out rows, (rows, length), the same every time."""
        return self.rows.held(job)[self.rank :: self.count]


def open_corpus(folder: Path, length: int) -> data.TokenFiles:
    """Return the tokens of the trainer's corpus for rows of `length`; make their files if they are not there."""
    config = DataConfig(sequence_length=length)
    return data.open_tokens(data.prepare(config, load_tokenizer(config.tokenizer), folder), config)


def run_jobs(folder: str, jobs: Sequence[Job]) -> list[Answer]:
    """Run jobs one after the other on all ranks; every rank is an island."""
    torch.set_num_threads(1)  # the launcher does this already, but the lab does not
    islands = _Islands(Path(folder), max(jobs, key=lambda job: job.length))
    return [_run(job, islands) for job in jobs]


def _run(job: Job, islands: _Islands) -> Answer:
    model = job.shape.build(job.length, seed=job.seed, device=job.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if job.warm_steps:
        islands.warm(job, model)
    if job.slices > 1:
        own = islands.rank % job.slices
        laconic.partial_updates(model, slice_index=own, num_slices=job.slices, include=job.include)
    optimizer = adamw_of(model, job)
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


def adamw_of(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)]
    return torch.optim.AdamW(decays, lr=job.lr, betas=BETAS, fused=True)


class _Steps:
    """The training steps of a job, and the bytes that they send."""

    def __init__(self, job: Job, islands: _Islands, *, averages: bool = False) -> None:
        """Prepare the steps. With `averages` all ranks average their gradients in every step."""
        self._job, self._islands, self._averages = job, islands, averages
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
            if self._averages:
                _average_gradients(trained)
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


def _average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average all gradients over the ranks, on the host: threads can do it, which DDP's reducer cannot serve."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu()
    dist.all_reduce(flat)
    means = (flat / dist.get_world_size()).split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


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
