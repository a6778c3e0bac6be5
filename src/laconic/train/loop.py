"""The training loop, from a configuration to a summary."""

import contextlib
import dataclasses
import errno
import gc
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

import laconic.checkpoint
from laconic import registry
from laconic.checkpoint import AsyncSaver, CheckpointError
from laconic.comm.agreement import RankGroup
from laconic.comm.failure import failing_together, set_peer_timeout
from laconic.comm.launch import RankInfo, ending_with_launcher, pick_device, process_group
from laconic.config import Config, JobError, to_dict, to_toml
from laconic.data.batches import Division
from laconic.errors import writing
from laconic.models.tokenizer import KEPT, load_tokenizer, save_tokenizer, with_vocabulary
from laconic.store import files
from laconic.strategies.checks import check_job
from laconic.strategies.cyclic import num_workers
from laconic.strategies.islands import num_launches
from laconic.strategies.memory import measured_peak
from laconic.strategies.optimizers import set_learning_rates
from laconic.strategies.stepper import CHECKPOINTS, NotFiniteError, Setup, Stepper
from laconic.strategies.under import strategy_of
from laconic.train import prepare
from laconic.train.balance import RowBalance
from laconic.train.lock import output_lock
from laconic.train.loggers import JsonlLogger, LineLogger, Logger, RunRecorder, TensorBoardLogger, WandbLogger
from laconic.train.meter import StepMeter
from laconic.train.prepare import with_strategy
from laconic.train.records import StepRecord, perplexity, reduce_records, summarise
from laconic.train.stopping import StopSignals

_T = TypeVar("_T")
_COLLECT_EVERY = 50  # steps between two collections of garbage
_MAX_PENDING = 100  # records that may wait before the figures of all ranks are combined


def run(config: Config) -> dict[str, Any]:
    """Train; return the summary, which rank 0 also writes to `summary.json` in the output folder.

    Every rank of a torchrun job calls this with the same configuration. Without torchrun the job has one rank.

    Raises:
        JobError: on every rank, for a mistake that a user can correct; before the first step wherever possible. A path
            of the job that fails on one rank alone is a JobError there, and peers end as after any failure.
    """
    ranks = RankInfo.from_environment()
    device = pick_device(config.train.device, ranks)
    check_job(config, ranks, device.type)
    set_peer_timeout(config.train.peer_timeout_s)
    with (
        _paths_as_job_errors(to_dict(config)),
        ending_with_launcher(),
        process_group(ranks, device, config.train.timeout_s) as group,
        failing_together(ranks.world_size),
        writing("a checkpoint", Path(config.train.output), _MEND, CheckpointError),
        contextlib.ExitStack() as lock,
    ):
        peers = RankGroup(group)
        peers.agree(lambda: lock.enter_context(output_lock(Path(config.train.output))), only=ranks.is_main)
        return Trainer(config, ranks, device, group).train()


@contextlib.contextmanager
def _paths_as_job_errors(job: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Turn the error of a file below a path that the job names, or of a full disk, into a JobError with the key."""
    try:
        yield
    except OSError as error:
        found = key_of(job, error.filename)
        if found is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise JobError(f"{found or 'a file of the job'}: {error}; mend that path, or choose another") from error


def key_of(job: Mapping[str, Mapping[str, Any]], filename: object) -> str | None:
    """The key of the job whose value is a path above, or equal to, the path of a file; "section.key = value"."""
    if not isinstance(filename, str | bytes):
        return None
    path = os.path.abspath(os.fsdecode(filename))
    found = [
        (len(value), f"{section}.{key} = {value!r}")
        for section, keys in job.items()
        for key, value in keys.items()
        if isinstance(value, str) and os.sep in value and (path + os.sep).startswith(os.path.abspath(value) + os.sep)
    ]
    return max(found)[1] if found else None


_MEND = " or mend the folder, and go on with --train.resume auto"


class Trainer:
    """One rank of one job. The constructor refuses a job that cannot work; `train` takes the steps."""

    def __init__(self, config: Config, ranks: RankInfo, device: torch.device, group: dist.ProcessGroup) -> None:
        """Prepare the job; `group` has all ranks and a backend for CPU tensors. Collective.

        Raises:
            JobError: on every rank, if a folder, corpus, tokenizer, model or checkpoint does not fit the job.
        """
        self.ranks, self.device, self.group = ranks, device, group
        self.peers = RankGroup(group)
        self.output = Path(config.train.output)
        self.console = Console(stderr=False, quiet=not ranks.is_main)
        self.peers.agree(lambda: prepare.open_output(config.train), only=ranks.is_first_on_node)
        self.peers.agree(lambda: prepare.check_wandb(config.log), only=ranks.is_main)
        tokenizer = self.peers.agree(lambda: load_tokenizer(config.data.tokenizer))
        assert tokenizer is not None
        config = replace(config, model=with_vocabulary(config.model, lambda: tokenizer))
        self.config = config = with_strategy(config, ranks, device.type, self.peers, self.console)
        written = to_toml(config)
        path = self.output / prepare.CONFIGURATION
        self._write("the configuration", lambda: files.write_text(path, written, durable=False))
        prepare.show_launch(Setup.of(config, ranks, device), self.console)
        model = self.peers.agree(  # shapes only, before the slow parts
            lambda: prepare.build_checked(config.model, config.lora, tokenizer, config.data.tokenizer)
        )
        assert model is not None
        corpus = prepare.open_training_data(config.data, config.train, tokenizer, self.peers, ranks, self.console)
        self._write("the tokenizer's files", lambda: save_tokenizer(config.data.tokenizer, self.output / KEPT))
        workers = num_workers(config.schedule, ranks) or ranks.world_size * num_launches(config.sync)
        self.config = config = replace(config, train=prepare.with_steps(config.train, corpus, workers))
        with prepare.as_job_error():
            strategy = strategy_of(config.shard, config.sync, config.schedule, config.pipeline)
            self.stepper: Stepper = registry.load(strategy.stepper)(model, Setup.of(self.config, ranks, device))
        if self.stepper.about:
            self.console.print(self.stepper.about, highlight=False)
        corpus.check_model(
            lambda batch: self.stepper.outputs(batch.to(device)), is_unequal=config.train.rows != "equal"
        )
        self.meter = StepMeter(self.stepper, ranks, device)
        self.start_step = 0
        extra: dict[str, Any] = {}
        if config.train.resume != "never":
            self.start_step, extra = prepare.resume(
                self.stepper, config.train, to_dict(config), self.peers, self.console
            )
        self.start_step = self.stepper.enter(self.start_step)
        say = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)
        self.balance = RowBalance(self.stepper.module, config.train, ranks, self.stepper.peers, device, say)
        self.balance.load(extra)
        self.corpus = corpus
        self.division = Division(
            num_workers=self.stepper.num_workers,
            workers=self.stepper.workers,
            peers=self.stepper.peers,
            micro_batch_size=config.train.micro_batch_size,
            accumulation=config.train.accumulation,
            equal_shapes=config.schedule.is_cyclic or config.pipeline.is_on,
            rows=self.balance.own_rows(),
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        self.saver: AsyncSaver | None = None
        if config.train.async_save:
            self.saver = AsyncSaver(self.output / CHECKPOINTS, keep=config.train.keep)
        self.stopped_by: str | None = None
        """The name of the signal that ended the run before its last step."""
        self.step_memory: dict[str, int | None] = {"step_peak_bytes": None, "resting_bytes": None}
        """The memory of step `log.memory_step`, in bytes, on the fullest rank; None if it is not measured."""

    def train(self) -> dict[str, Any]:
        """Take the remaining steps; return the summary. Collective.

        Raises:
            JobError: the loss or the gradient norm is not finite.
        """
        train, corpus = self.config.train, self.corpus
        with (
            contextlib.closing(self._open_recorder()) as self.recorder,
            _manual_garbage_collection() as collect,
            self.saver or contextlib.nullcontext(),
            StopSignals(self.start_step + 1) as signals,
        ):
            if self.stepper.recovered_steps == self.start_step == train.steps:
                self._end_again()
            for done in range(self.start_step + 1, train.steps + 1):
                self.recorder.add(self._step(done - 1))
                if done < train.steps and self.balance.compare(done - self.start_step, done, self.peers):
                    self.division = replace(self.division, rows=self.balance.own_rows())
                is_first = done == self.start_step + 1  # a line for the first step shows that the run works
                if is_first or self._is_due(done, train.log_every) or self.recorder.num_pending >= _MAX_PENDING:
                    self.recorder.flush()
                if train.eval_every and self._is_due(done, train.eval_every):
                    self._evaluate(done)
                if train.save_every >= 0 and self._is_due(done, train.save_every):
                    self._save(done)
                if done % _COLLECT_EVERY == 0:
                    collect()
                if done < train.steps and (stop := signals.end_step(done)):
                    self._stop(done, stop)
                    break
        self.stepper.close()
        self.balance.close()
        summary = {
            **summarise(self.config, self.ranks, self.stepper.module, self.recorder.steps),
            "device": self.device.type,
            "placements": {name: dataclasses.asdict(each) for name, each in self.stepper.placements().items()},
            "rows": list(self.balance.rows),
            "start_step": self.start_step,
            "tokens_per_step": corpus.tokens_after(self.division, train.steps) // train.steps,
            "evaluations": self.recorder.evaluations,
            "stopped_by": self.stopped_by,
            **self.step_memory,
        }
        text = json.dumps(summary, indent=1) + "\n"
        self._write("the summary", lambda: files.write_text(self.output / "summary.json", text, durable=False))
        return summary

    def _write(self, what: str, action: Callable[[], _T]) -> _T | None:
        """Write `what` on rank 0; return the result there, and None on other ranks. Collective.

        Raises:
            JobError: on every rank, if `what` cannot be written.
        """

        def write() -> _T:
            with writing(what, self.output, _MEND):
                return action()

        return self.peers.agree(write, only=self.ranks.is_main)

    def _end_again(self) -> None:
        """Evaluate and save after the last step, if islands go on from its sync: a kill may have come before either."""
        if self.config.train.eval_every:
            self._evaluate(self.start_step)
        folder = self.output / CHECKPOINTS
        is_saved = self.peers.broadcast(self.ranks.is_main and prepare.newest_step(folder) >= self.start_step)
        if self.config.train.save_every >= 0 and not is_saved:
            self._save(self.start_step)

    def _stop(self, done: int, stop: signal.Signals) -> None:
        """End the run after step `done`, with a checkpoint unless train.save_every forbids it or has just made one."""
        self.stopped_by = stop.name
        every = self.config.train.save_every
        if every >= 0 and not self._is_due(done, every):
            self._save(done)
        self.recorder.flush()

    def _is_due(self, done: int, every: int) -> bool:
        """Whether step `done` is the last one, or a multiple of `every`. With 0, only the last step counts."""
        return done == self.config.train.steps or (every > 0 and done % every == 0)

    def _open_recorder(self) -> RunRecorder:
        loggers = self._write("the figures of the run", self._open_loggers) or []
        tokens_after = partial(self.corpus.tokens_after, self.division)
        reduce = partial(reduce_records, ranks=self.ranks, group=self.group, tokens_after=tokens_after)
        reduce = partial(reduce, steps_per_sync=self.stepper.steps_per_sync)
        return RunRecorder(loggers, reduce, partial(self._write, "the figures of the run"))

    def _open_loggers(self) -> list[Logger]:
        log, train, start = self.config.log, self.config.train, self.start_step
        loggers: list[Logger] = []
        if log.jsonl:
            loggers.append(JsonlLogger(self.output / "metrics.jsonl", after_step=start))
        if log.tensorboard:
            loggers.append(TensorBoardLogger(self.output / "tensorboard", after_step=start))
        if log.wandb:
            loggers.append(WandbLogger(to_dict(self.config), self.output, after_step=start))
        return [*loggers, LineLogger(self.console, total=train.steps, every=train.log_every)]

    def _step(self, step: int) -> StepRecord:
        """Take one optimizer step, the `step`-th of the run, counted from 0."""
        if self.device.type != "cpu" or step + 1 != self.config.log.memory_step:
            return self._take_step(step)
        with measured_peak() as peak:
            record = self._take_step(step)
        fullest = torch.tensor([peak.nbytes or 0, self.stepper.resting_bytes()])
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX, group=self.group)
        self.step_memory = dict(zip(self.step_memory, fullest.tolist(), strict=True))
        return record

    def _take_step(self, step: int) -> StepRecord:
        config = self.config
        self.meter.fetch()
        batches = [batch.to(self.device) for batch in self.corpus.step(self.division, step)]
        taken = step - self.stepper.num_skipped
        lr = set_learning_rates(self.stepper.optimizer, taken, config.optimizer, config.train.steps)
        torch.manual_seed(_step_seed(config.train.seed, step, self.ranks.rank))
        self.stepper.begin()
        self.balance.begin_step(step + 1 - self.start_step)
        self.meter.start()
        try:
            result = self.stepper.step(batches, is_last=step + 1 == config.train.steps)
        except NotFiniteError as error:
            self._stop_training(step, error)
        record = self.meter.stop(step + 1, lr, result)
        self.balance.end_step()
        return replace(record, rows=self.balance.rows)

    def _stop_training(self, last_step: int, error: NotFiniteError) -> NoReturn:
        """Raise a JobError: see [Note: Non-finite losses] in strategies/simultaneous.py."""
        if error.is_on_all_ranks:
            self.recorder.flush()
        norm = "" if error.grad_norm is None else f", gradient norm {error.grad_norm}"
        raise JobError(
            f"training stopped before the optimizer of step {last_step + 1}: loss {error.loss} on rank "
            f"{self.ranks.rank}{norm}. The weights are {error.weights.format(step=last_step)}. Try a lower "
            "optimizer.lr, more optimizer.warmup_steps, a smaller optimizer.max_grad_norm or another dtype; "
            f"checkpoints, if any, are in {self.output / CHECKPOINTS}"
        ) from None

    def _evaluate(self, step: int) -> None:
        """Compute the mean loss over the first held-out rows. These rows are the same every time."""
        self.recorder.flush()
        self.stepper.set_training(False)
        parts = range(self.ranks.rank, self.ranks.rank + 1) if self.stepper.held_out is None else self.stepper.held_out
        total = torch.zeros(2, dtype=torch.float64)
        with self.stepper.consistent(), torch.no_grad():
            for part in parts:
                division = replace(self.division, rank=part)
                for batch in self.corpus.held_out(division, self.config.train.eval_batches):
                    loss = self.stepper.loss(batch.to(self.device))
                    total += torch.tensor([float(loss) * batch.weight, batch.weight], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        loss_sum, weight = total.tolist()
        mean = loss_sum / weight
        self.recorder.add_evaluation(step, {"eval_loss": mean, "eval_perplexity": perplexity(mean)})
        self.meter.skip()

    def _save(self, step: int) -> None:
        """Write a checkpoint or, with train.async_save, start to write it."""
        self.recorder.flush()
        extra = {
            "tokens": self.corpus.tokens_after(self.division, step),
            "config": to_dict(self.config),
            **self.balance.state(),
        }
        folder, keep = self.output / CHECKPOINTS, self.config.train.keep
        save = self.saver.save if self.saver else partial(laconic.checkpoint.save_checkpoint, folder, keep=keep)
        self.stepper.save(partial(save, step), extra)
        self.meter.skip()


@contextlib.contextmanager
def _manual_garbage_collection() -> Iterator[Callable[[], int]]:
    """Collect garbage between steps only. If ranks paused at different moments, all would wait for each pause.

    A process that has frozen its objects, as a fork server does, keeps them frozen: to thaw them would cost each later
    collection a look at all of them, and a fork a copy.
    """
    gc.collect()
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        if freezes:
            gc.unfreeze()


def _step_seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63  # within the range of torch.manual_seed
