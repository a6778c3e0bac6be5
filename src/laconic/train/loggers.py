"""Loggers: the figures of a run in files, and as plain lines on the terminal; and the recorder that passes them on.

Nothing here runs inside a timed step: a few small collectives between steps combine the records of several steps.
"""

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from laconic.store import files
from laconic.train.records import ClusterStep, StepRecord, SyncMetrics

_WANDB_RUN = "wandb-run-id"
_GROUPS = {
    "train": ("loss", "perplexity", "grad_norm", "lr", "tokens", "loss_scale", "skipped_steps"),
    "speed": ("step_s", "data_s", "tokens_per_s", "allocated_peak_bytes"),
    "wire": ("wait_s", "wire_bytes", "interface_sent_bytes", "loopback_bytes"),
    "memory": ("device_bytes", "device_peak_bytes", "host_bytes_per_node", "resident_bytes"),
}
"""The groups of the plain figures of a step, in TensorBoard and in Weights & Biases."""


class Logger:
    """Receives the figures of a run. Every method of this base class does nothing."""

    def step(self, step: ClusterStep) -> None:
        """Receive the figures of all ranks for a step."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the figures of an evaluation after `step`."""

    def close(self) -> None:
        """Finish the output."""


class _Appended:
    """A file that grows by whole records: a record that cannot be written whole is taken back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, record: bytes) -> None:
        """Append a record. Raises: OSError: it does not fit, and the file is as it was."""
        before = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonlLogger(Logger):
    """Writes one JSON object per line, each at once."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Continue the file `path`, if there is one, without the lines of steps after `after_step` and broken ones.

        Raises:
            OSError: a file cannot be read or written. `path` stays as it was.
        """
        kept = _whole_lines(path, after_step) if path.exists() else []
        self._last_evaluated = max((row["step"] for row, _ in kept if "loss" not in row), default=0)
        if path.exists():
            with files.replacing(path, durable=False) as temporary:
                temporary.write_bytes(b"".join(line for _, line in kept))
        self._file = _Appended(path)

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        self._write(step.to_dict())

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`. A run that goes on may repeat the last evaluation, which has a line already."""
        if step > self._last_evaluated:
            self._write({"step": step, **values})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(f"{json.dumps(row)}\n".encode())

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


def _whole_lines(path: Path, after_step: int) -> list[tuple[dict[str, Any], bytes]]:
    """The objects of steps up to `after_step`, each with its line. A killed run may leave half a line."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            row = json.loads(line)
            if row["step"] <= after_step and line.endswith(b"\n"):
                found.append((row, line))
    return found


def scalars_of(step: ClusterStep) -> dict[str, float]:
    """The figures of a step as flat scalars, by "group/name"."""
    row = step.to_dict()
    scalars = {f"{group}/{key}": row[key] for group, keys in _GROUPS.items() for key in keys if key in row}
    scalars |= {f"traffic_bytes/{key}": value for key, value in row.get("traffic_bytes", {}).items()}
    for sync in row.get("syncs", ()):
        tag = f"fragment-{sync['fragment']}"
        scalars |= {f"sync/{key}/{tag}": value for key, value in sync.items() if key not in ("step", "fragment")}
    return scalars


class _ScalarLogger(Logger):
    """Passes figures on as flat scalars, by "group/name"."""

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        self._log(step.step, scalars_of(step))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        self._log(step, {f"eval/{name}": value for name, value in values.items()})

    def _log(self, step: int, scalars: Mapping[str, float]) -> None:
        raise NotImplementedError


class TensorBoardLogger(_ScalarLogger):
    """Writes scalars in the groups train, speed, wire, traffic_bytes, memory, sync and eval.

    torch's `SummaryWriter` writes in a thread, which shows a traceback of its own where the disk is full. So this
    class gives the same events to TensorBoard's `RecordWriter`.
    """

    def __init__(self, folder: Path, *, after_step: int) -> None:
        """Continue the events in `folder`, if there are any, without the events of steps after `after_step`.

        Raises:
            OSError: the folder cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata  # slow to import
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = (
            f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        )
        self._file = _Appended(folder / name)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2", source_metadata=SourceMetadata(writer="laconic"))
        if after_step:  # TensorBoard then drops the events from this step on that older files have
            self._add(step=after_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _log(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step=step, summary=self._summary(value=values))

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


class WandbLogger(_ScalarLogger):
    """Sends the same scalars to Weights & Biases, whose package reads its account and mode from the environment."""

    def __init__(self, job: Mapping[str, Any], folder: Path, *, after_step: int) -> None:
        """Begin a run of `job`, or after step `after_step` go on with the one that was begun in `folder`."""
        import wandb

        noted = folder / _WANDB_RUN
        run_id = noted.read_text().strip() if after_step and noted.is_file() else None
        project = os.environ.get("WANDB_PROJECT", "laconic")
        self._run = wandb.init(project=project, dir=str(folder), config=job, id=run_id, resume="allow")
        noted.write_text(f"{self._run.id}\n")

    def _log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()


_SHOWN_WAIT = 0.01  # the share of a step that waiting for data must take to be shown


def describe_step(step: ClusterStep, total: int) -> str:
    """One line about a step, for a run of `total` steps."""
    width = len(str(total))
    parts = [
        f"step {step.step:>{width}}/{total}",
        f"loss {step.loss:.4f}",
        f"perplexity {step.perplexity:.4g}",
        *([f"grad norm {step.grad_norm:.3f}"] if step.grad_norm is not None else []),
        f"lr {step.lr:.2e}",
        f"{step.step_s:.3f} s/step",
        f"{step.tokens_per_s:,.0f} tokens/s",
        *([f"waited {step.data_s:.3f} s for data"] if step.data_s > _SHOWN_WAIT * step.step_s else []),
        _memory(step),
        *([f"loss scale {step.loss_scale:g}, {step.skipped_steps} skipped"] if step.loss_scale is not None else []),
    ]
    wire = step.interface_sent_bytes if step.interface_sent_bytes is not None else step.wire_bytes
    if wire is not None:
        parts.append(f"wire {wire / 1e6:.2f} MB")
    if step.wait_s is not None:
        parts.append(f"waited {step.wait_s:.3f} s for it")
    return " | ".join(parts)


def _memory(step: ClusterStep) -> str:
    """The memory of the fullest rank: on its device, if anything counts that, and resident on its host."""
    on_device = step.allocated_peak_bytes or step.device_peak_bytes
    device = "" if on_device is None else f"device {on_device / 1e9:.2f} GB, "
    return f"{device}host {step.resident_bytes / 1e9:.2f} GB"


def describe_sync(sync: SyncMetrics, total: int) -> str:
    """One line about a sync of islands, for a run of `total` steps."""
    parts = [
        f"step {sync.step:>{len(str(total))}}/{total}",
        f"synced fragment {sync.fragment}",
        f"drift {sync.drift_norm:.3f}, mean {sync.mean_norm:.3f}, cosine {sync.cosine:.3f}",
        f"codec error {sync.codec_error:.4f}",
        f"{sync.bytes_per_token:.2f} bytes/token",
        f"{sync.hidden_s:.3f} s hidden, {sync.exposed_s:.3f} s exposed",
    ]
    return " | ".join(parts)


class LineLogger(Logger):
    """Prints a line after step 1, every `every` steps and the last one, and a line about the latest sync of islands.

    The seconds that are left follow from the pace since the first line: the step before it may compile and warm up.
    """

    def __init__(self, console: Console, *, total: int, every: int) -> None:
        self._console, self._total, self._every = console, total, every
        self._last_sync: SyncMetrics | None = None
        self._begun_s = time.monotonic()
        self._first: tuple[int, float] | None = None
        """The step of the first line, and its time."""

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        if step.syncs:
            self._last_sync = step.syncs[-1]
        if step.step % self._every == 0 or step.step in (1, self._total):
            self._print(f"{describe_step(step, self._total)} | {self._progress_at(step.step)}")
            if self._last_sync is not None:
                self._print(describe_sync(self._last_sync, self._total))
                self._last_sync = None

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        shown = " | ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self._print(f"step {step:>{len(str(self._total))}}/{self._total} | {shown}")

    def _progress_at(self, step: int) -> str:
        now_s = time.monotonic()
        first_step, first_s = self._first = self._first or (step, now_s)
        done = f"{step / self._total:.0%}, {timedelta(seconds=round(now_s - self._begun_s))} elapsed"
        if first_step == step:
            return done
        left_s = (now_s - first_s) / (step - first_step) * (self._total - step)
        return f"{done}, {timedelta(seconds=round(left_s))} left"

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class RunRecorder:
    """Collects the records of this rank, and keeps the figures of the cluster."""

    def __init__(
        self,
        loggers: Sequence[Logger],
        reduce: Callable[[Sequence[StepRecord]], Sequence[ClusterStep]],
        write: Callable[[Callable[[], None]], object],
    ) -> None:
        """`loggers` is empty except on rank 0.

        `reduce` is `reduce_records` with all arguments but the records. `write` calls an action that writes to files,
        on rank 0, and raises its error on all ranks. Collective.
        """
        self.steps: list[ClusterStep] = []  # the figures of all steps that are combined
        self.evaluations: list[dict[str, float]] = []
        """The figures of all evaluations so far, each with its step."""
        self._loggers, self._reduce, self._write = loggers, reduce, write
        self._pending: list[StepRecord] = []

    @property
    def num_pending(self) -> int:
        """The number of records that are not combined yet."""
        return len(self._pending)

    def add(self, record: StepRecord) -> None:
        """Keep a record of this rank until the next `flush`."""
        self._pending.append(record)

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Keep and log the figures of an evaluation after `step`, which are the same on all ranks. Collective."""
        self.evaluations.append({"step": step, **values})

        def log() -> None:
            for logger in self._loggers:
                logger.evaluation(step, values)

        self._write(log)

    def flush(self) -> None:
        """Combine the pending records of all ranks, and log the figures. Collective."""
        if not self._pending:
            return
        steps = self._reduce(self._pending)
        self._pending.clear()
        self.steps.extend(steps)

        def log() -> None:
            for step, logger in itertools.product(steps, self._loggers):
                logger.step(step)

        self._write(log)

    def close(self) -> None:
        """Close the loggers. They have written everything, so no error of a file can lose anything here."""
        for logger in self._loggers:
            with contextlib.suppress(OSError):
                logger.close()
