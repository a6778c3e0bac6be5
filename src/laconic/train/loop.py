"""The training job, from a configuration to a summary."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import laconic.checkpoint
from laconic import files
from laconic.checkpoint import AsyncSaver
from laconic.comm.agreement import RankGroup
from laconic.comm.failure import failing_together
from laconic.comm.launch import RankInfo, pick_device, process_group
from laconic.comm.traffic import Snapshot
from laconic.config.job import Config, JobError, to_dict, to_toml
from laconic.data import tokens as data
from laconic.data.sampler import Sampler
from laconic.hf.tokenizer import Tokenizer, load_tokenizer
from laconic.strategies.memory import measured_peak
from laconic.strategies.optimizers import require_optimizer, set_learning_rates
from laconic.strategies.staggered import CyclicStepper, newest_extra, num_workers, require_schedule
from laconic.strategies.stepper import NotFinite, Simultaneous, Stepper
from laconic.strategies.sync import num_islands, require_sync
from laconic.train.metrics import JsonlLogger, Logger, Loggers, Step, StepRecord, TensorBoardLogger, reduce_records
from laconic.train.prepare import (
    CHECKPOINTS,
    as_job_error,
    build_checked,
    differences,
    newest_step,
    open_output,
    require_model,
    with_vocabulary,
)
from laconic.train.progress import BarLogger, LineLogger
from laconic.train.summary import summarise

_COLLECT_EVERY = 50
_FLUSH_AT_MOST = 100


def run(config: Config) -> dict[str, Any]:
    """Train; returns the summary that rank 0 also writes to `summary.json` in the output folder.

    Every rank of a torchrun job calls this with the same configuration; without torchrun it is a job of one rank.
    Raises: JobError (on every rank) for what a user can mend, before the first step wherever it can be known then.
    """
    require_model(config)
    require_optimizer(config)
    require_sync(config)
    require_schedule(config)
    ranks = RankInfo.from_environment()
    num_islands(config, ranks)
    num_workers(config, ranks)
    device = pick_device(config.train.device, ranks)
    with process_group(ranks, device, config.train.timeout_s) as group, failing_together(ranks.world_size):
        trainer = Trainer(config, ranks, device, group)
        try:
            return trainer.train()
        finally:
            trainer.logger.close()


class Trainer:
    """One rank of one job. Making it does everything that can be refused; `train` takes the steps."""

    def __init__(self, config: Config, ranks: RankInfo, device: torch.device, group: dist.ProcessGroup) -> None:
        self.ranks, self.device, self.group = ranks, device, group
        self.peers = RankGroup(group)
        self.logger: Logger = Logger()
        self.output = Path(config.train.output)
        self.peers.agree(lambda: open_output(config), only=ranks.is_first_on_node)
        tokenizer = _require(self.peers.agree(lambda: load_tokenizer(config.data.tokenizer)))
        self.config = config = with_vocabulary(config, tokenizer)
        self.console = Console(stderr=False, quiet=not ranks.is_main)
        self._tell_configuration()
        model = _require(
            self.peers.agree(lambda: build_checked(config, tokenizer))
        )  # shapes only, before the slow parts
        self.tokens = self._open_tokens(tokenizer)
        with as_job_error():
            self.stepper = self._make_stepper(model)
        self.sampler = Sampler(
            seed=config.data.seed,
            num_tokens=len(self.tokens.train),
            sequence_length=config.data.sequence_length,
            micro_batch_size=config.train.micro_batch_size,
            accumulation=config.train.accumulation,
            world_size=self.stepper.num_workers,
        )
        self.saver = AsyncSaver(self.output / CHECKPOINTS, keep=config.train.keep) if config.train.async_save else None
        self.start_step = self._resume() if config.train.resume else 0
        self.history: list[Step] = []
        self.evaluations: list[dict[str, float]] = []
        self.measured: dict[str, int | None] = {"step_peak_bytes": None, "resting_bytes": None}
        """Set by log.memory_step: the fullest rank's, measured by the allocator."""
        self._pending: list[StepRecord] = []
        # Read where the step before ended, at its last collective: by the time this rank begins a step, another rank of
        # its node may already be sending. None after something else has been on the wire.
        self._interface_before: tuple[int, int] | None = None
        self._traffic_before: Snapshot | None = None  # where the step before ended

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.sampler.rows_per_step * self.config.data.sequence_length

    # ------------------------------------------------------------------------------------ before the steps

    def _tell_configuration(self) -> None:
        text, ranks = to_toml(self.config), self.ranks
        launch = f"{ranks.num_nodes} nodes x {ranks.num_local} ranks, {self.device.type}"
        if self.config.schedule.is_cyclic:
            launch += f", {num_workers(self.config, ranks)} workers one after the other by {self.config.schedule.rule}"
        if self.config.sync.is_local:
            launch += f", {num_islands(self.config, ranks)} islands that agree every {self.config.sync.every} steps"
        self.console.print(f"{text}\n{launch}", markup=False, highlight=False, soft_wrap=True)
        if ranks.is_main:
            (self.output / "config.toml").write_text(text, encoding="utf-8")

    def _open_tokens(self, tokenizer: Tokenizer) -> data.TokenFiles:
        config = self.config.data
        folder = Path(config.cache) if config.cache else self.output / "tokens"
        first = self.ranks.is_first_on_node
        self.peers.agree(lambda: data.prepare(config, tokenizer, folder), only=first)
        tokens = _require(self.peers.agree(lambda: data.open_tokens(data.prepare(config, tokenizer, folder), config)))
        if self.config.train.eval_every and not len(tokens.evaluation):
            raise JobError("train.eval_every is set, but data.eval_fraction = 0 holds nothing out; set one of the two")
        self.console.print(
            f"corpus: {tokens.num_documents:,} documents, {len(tokens.train):,} tokens to train on, "
            f"{len(tokens.evaluation):,} held out",
            highlight=False,
        )
        return tokens

    def _make_stepper(self, model: nn.Module) -> Stepper:
        if not self.config.schedule.is_cyclic:
            return Simultaneous(model, self.config, self.ranks, self.device)
        resumes = self.config.train.resume and self.ranks.is_main
        saved = self.peers.broadcast(newest_extra(self.output / CHECKPOINTS) if resumes else None)
        stepper = CyclicStepper(model, self.config, self.ranks, self.device, saved)
        self.console.print(f"cut into stages of {stepper.blocks_by_stage} blocks", highlight=False)
        return stepper

    def _resume(self) -> int:
        recovered = self.stepper.recovered_steps
        newest = self.peers.broadcast(newest_step(self.output / CHECKPOINTS) if self.ranks.is_main else 0)
        if recovered and recovered >= newest:
            self.console.print(f"going on from what islands agreed on after step {recovered}", highlight=False)
            return recovered
        with as_job_error():
            extra = self.stepper.load(self.output / CHECKPOINTS)
        if extra is None:
            self.console.print("nothing to resume: starting from step 0")
            return 0
        changed = differences(extra["config"], to_dict(self.config))
        if changed:
            self.console.print(f"resuming with a changed configuration: {'; '.join(changed)}", markup=False)
        self.console.print(f"resuming after step {extra['step']}", highlight=False)
        if "islands" in extra:
            self.console.print(f"the checkpoint {extra['islands']}", highlight=False, soft_wrap=True)
        return int(extra["step"])

    def _open_logger(self) -> Logger:
        log, train = self.config.log, self.config.train
        if not self.ranks.is_main:
            return Logger()
        loggers: list[Logger] = []
        if log.jsonl:
            loggers.append(JsonlLogger(self.output / "metrics.jsonl", after_step=self.start_step))
        if log.tensorboard:
            loggers.append(TensorBoardLogger(self.output / "tensorboard", after_step=self.start_step))
        if log.progress and self.console.is_terminal:
            loggers.append(BarLogger(self.console, total=train.steps, every=train.log_every, start=self.start_step))
        else:
            loggers.append(LineLogger(self.console, total=train.steps, every=train.log_every))
        return Loggers(loggers)

    # ------------------------------------------------------------------------------------ the steps

    def train(self) -> dict[str, Any]:
        """Take the steps that are left."""
        train = self.config.train
        watched = self.config.log.memory_step if self.device.type == "cpu" else 0
        self.logger = self._open_logger()
        with _manual_garbage_collection() as collect, self.saver or contextlib.nullcontext():
            for step in range(self.start_step, train.steps):
                self._pending.append(self._watched_step(step) if step + 1 == watched else self._step(step))
                done = step + 1
                loss = self._pending[-1].loss
                self.logger.tick(done, math.nan if loss is None else loss)
                last = done == train.steps
                first = step == self.start_step  # seen at once, a first line says that it works
                if first or last or done % train.log_every == 0 or len(self._pending) >= _FLUSH_AT_MOST:
                    self._flush()
                if train.eval_every and (last or done % train.eval_every == 0):
                    self._flush()
                    self._evaluate(done)
                    self._interface_before = None
                if train.save_every >= 0 and (last or (train.save_every and done % train.save_every == 0)):
                    self._flush()
                    self._save(done)
                    self._interface_before = None
                if done % _COLLECT_EVERY == 0:
                    collect()
        self.stepper.close()
        summary = summarise(self)
        if self.ranks.is_main:
            files.write_text(self.output / "summary.json", json.dumps(summary, indent=1) + "\n", durable=False)
        return summary

    def _watched_step(self, step: int) -> StepRecord:
        with measured_peak() as peak:
            record = self._step(step)
        most = torch.tensor([peak.nbytes or 0, self.stepper.resting_bytes()])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        self.measured = dict(zip(("step_peak_bytes", "resting_bytes"), most.tolist(), strict=True))
        return record

    def _step(self, step: int) -> StepRecord:
        config = self.config
        began_s = time.perf_counter()
        batch = self._batch(self.tokens.train, self._offsets(step))
        lr = set_learning_rates(self.stepper.optimizer, step, config)
        torch.manual_seed(_step_seed(config.train.seed, step, self.ranks.rank))
        self.stepper.begin()
        self._synchronize()
        interface = self._interface_before or self._interface_bytes()
        traffic, start_s = self.stepper.traffic(self._traffic_before), time.perf_counter()

        try:
            taken = self.stepper.step(batch, is_last=step + 1 == config.train.steps)
        except NotFinite as error:
            self._refuse_to_go_on(step + 1, error)
        self._synchronize()

        step_s = time.perf_counter() - start_s
        after = self._interface_before = self._interface_bytes()
        moved = self._traffic_before = self.stepper.traffic()
        return StepRecord(
            step=step + 1,
            loss=taken.loss,
            grad_norm=taken.grad_norm,
            lr=lr,
            step_s=step_s,
            data_s=start_s - began_s,
            traffic=moved - traffic if moved is not None and traffic is not None else None,
            interface_sent_bytes=after[0] - interface[0] if after and interface else None,
            interface_received_bytes=after[1] - interface[1] if after and interface else None,
            memory=self.stepper.memory(),
            syncs=taken.syncs,
            staggering=taken.staggering,
        )

    def _offsets(self, step: int) -> np.ndarray:
        """Of this rank's rows, shape (micro-batches, rows)."""
        workers = self.stepper.workers
        offsets = self.sampler.global_offsets(step)[:, workers.start : workers.stop]
        return offsets.reshape(-1, self.config.train.micro_batch_size)

    def _batch(self, tokens: np.ndarray, offsets: np.ndarray) -> Tensor:
        rows = torch.from_numpy(data.rows_at(tokens, offsets, self.config.data.sequence_length))
        return rows.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else rows

    def _refuse_to_go_on(self, step: int, error: NotFinite) -> NoReturn:
        """See [Note: Non-finite losses] in steppers.py."""
        if error.is_known_to_all:
            self._flush()
        norm = "" if error.grad_norm is None else f", gradient norm {error.grad_norm}"
        raise JobError(
            f"training stopped before the optimizer of step {step}: loss {error.loss} on rank {self.ranks.rank}{norm}. "
            f"The weights are {error.weights.format(step=step - 1)}. Try a lower optimizer.lr, more "
            "optimizer.warmup_steps, a smaller optimizer.max_grad_norm or another dtype; checkpoints, if any, are in "
            f"{self.output / CHECKPOINTS}"
        ) from None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _interface_bytes(self) -> tuple[int, int] | None:
        """(sent, received) by this node so far, where the lab counts them; asked by one rank per node."""
        if not self.ranks.is_first_on_node:
            return None
        try:
            from laconic.lab.counters import interface_bytes
        except ImportError:  # the library without the lab
            return None
        counted = interface_bytes()
        return (counted.sent, counted.received) if counted else None

    # ------------------------------------------------------------------------------------ between the steps

    def _flush(self) -> None:
        """Put the pending records of all ranks together and tell them. Collective."""
        steps = reduce_records(
            self._pending,
            self.ranks,
            self.group,
            tokens_per_step=self.tokens_per_step,
            steps_per_sync=self.stepper.steps_per_sync,
        )
        self._pending.clear()
        self.history.extend(steps)
        for step in steps:
            self.logger.step(step)

    def _evaluate(self, step: int) -> None:
        """Mean loss over the first rows of the held-out tokens, the same rows every time; of what islands agreed on."""
        length, rows_each = self.config.data.sequence_length, self.config.train.micro_batch_size
        num_rows = len(self.tokens.evaluation) // length
        rows_at_once = rows_each * self.ranks.world_size
        num_batches = min(self.config.train.eval_batches, -(-num_rows // rows_at_once))
        self.stepper.module.eval()
        total = 0.0
        with self.stepper.consistent(), torch.no_grad():
            for index in range(num_batches):
                first = index * rows_at_once + self.ranks.rank * rows_each
                rows = (first + np.arange(rows_each)) % num_rows  # the last batch wraps around
                total += float(self.stepper.loss(self._batch(self.tokens.evaluation, rows * length)))
        mean = torch.tensor([total / num_batches], dtype=torch.float64)
        dist.all_reduce(mean, group=self.group)
        values = {"eval_loss": float(mean) / self.ranks.world_size}
        self.evaluations.append({"step": step, **values})
        self.logger.evaluation(step, values)

    def _save(self, step: int) -> None:
        extra = {"tokens": step * self.tokens_per_step, "config": to_dict(self.config)}
        if self.saver is not None:
            self.stepper.save(partial(self.saver.save, step), extra)
        else:
            keep = self.config.train.keep
            save = partial(laconic.checkpoint.save_checkpoint, self.output / CHECKPOINTS, step, keep=keep)
            self.stepper.save(save, extra)


def _require(value: Any) -> Any:
    assert value is not None
    return value


@contextlib.contextmanager
def _manual_garbage_collection() -> Iterator[Any]:
    """Collect between steps only: otherwise ranks pause at different moments and all wait for each pause."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


def _step_seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
