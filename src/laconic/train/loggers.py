"""Loggers: the figures of a run in files, and on the terminal, as a bar or as plain lines."""

import contextlib
import json
import math
import os
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from laconic.config import LogConfig
from laconic.store import files
from laconic.train.records import ClusterStep, SyncMetrics

_WANDB_RUN = "wandb-run-id"
_GROUPS = {
    "train": ("loss", "perplexity", "grad_norm", "lr", "tokens", "loss_scale", "skipped_steps"),
    "speed": ("step_s", "data_s", "tokens_per_s", "mfu", "allocated_peak_bytes"),
    "wire": ("wait_s", "wire_bytes", "interface_sent_bytes", "interface_received_bytes", "loopback_bytes"),
    "memory": ("device_bytes", "device_peak_bytes", "host_bytes_per_node", "resident_bytes"),
}
"""The groups of the plain figures of a step, in TensorBoard and in Weights & Biases."""


class Logger:
    """Receives the figures of a run. Every method of this base class does nothing."""

    def tick(self, step: int, loss: float) -> None:
        """Receive this rank's loss right after a step, before the figures of all ranks are known."""

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
    """Writes one JSON object per line, each at once. The last key, `crc32`, is the CRC-32 of the line without it."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Continue the file `path`, if there is one, without the lines of steps after `after_step`.

        Damaged lines are put aside into `path` + ".damaged", and a line on stderr says so.

        Raises:
            OSError: a file cannot be read or written. `path` stays as it was.
        """
        self._last_evaluated = self._repair(path, after_step) if path.exists() else 0
        self._file = _Appended(path)

    @staticmethod
    def _repair(path: Path, after_step: int) -> int:
        """Remove what is damaged, and later lines. Returns the step of the last evaluation that is left, or 0."""
        records, damaged, missing = read_metrics(path)
        kept = [line for step, line in records if step <= after_step]
        last = max((step for step, _ in records), default=0)
        num_missing = sum(step <= after_step for step in missing) + max(after_step - last, 0)
        if damaged or num_missing:
            aside = path.with_name(f"{path.name}.damaged")
            with aside.open("ab") as file:
                file.writelines(line + b"\n" for line in damaged)
            print(
                f"{path} is not whole: {len(damaged)} lines are put aside into {aside.name}, and {num_missing} of the "
                f"steps up to step {after_step} have no line; the run goes on",
                file=sys.stderr,
                flush=True,
            )
        _replace(path, b"".join(line + b"\n" for line in kept))
        return max(
            (step for step, line in records if step <= after_step and _is_evaluation(json.loads(line))), default=0
        )

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        self._write(step.to_dict())

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`. A run that goes on may repeat the last evaluation, which has a line already."""
        if step > self._last_evaluated:
            self._write({"step": step, **values})

    def _write(self, row: Mapping[str, Any]) -> None:
        text = json.dumps(row)
        crc32 = zlib.crc32(text.encode())
        self._file.write(f'{text[:-1]}, "crc32": {crc32}}}\n'.encode())

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


def read_metrics(path: Path) -> tuple[list[tuple[int, bytes]], list[bytes], list[int]]:
    """Read `metrics.jsonl`: each step with its line; the damaged lines; and the steps without a line in between.

    A line is damaged if it is not JSON, does not have its CRC-32, or has the step of an earlier line. Only the first
    lines may have no CRC-32: an older release wrote them. The half line of a killed run is damaged, too.
    """
    records: list[tuple[int, bytes]] = []
    damaged: list[bytes] = []
    last = {True: 0, False: 0}
    has_crc32 = False
    for line in filter(None, path.read_bytes().split(b"\n")):
        try:
            row = json.loads(line)
            text, key, crc32 = line.rpartition(b', "crc32": ')
            has_crc32 = has_crc32 or bool(key)
            is_whole = type(row["step"]) is int and (not has_crc32 or int(crc32[:-1]) == zlib.crc32(text + b"}"))
            step, is_evaluation = row["step"], _is_evaluation(row)
        except (ValueError, KeyError, TypeError, RecursionError):  # UnicodeDecodeError is a ValueError
            is_whole = False
        if not is_whole or step <= last[is_evaluation]:
            damaged.append(line)
            continue
        last[is_evaluation] = step
        records.append((step, line))
    found = {step for step, _ in records}
    return records, damaged, [step for step in range(min(found, default=0), max(found, default=0)) if step not in found]


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return "loss" not in row


def _replace(path: Path, content: bytes) -> None:
    with files.replacing(path, durable=False) as temporary:
        temporary.write_bytes(content)


def scalars_of(step: ClusterStep) -> dict[str, float]:
    """The figures of a step as flat scalars, by "group/name"."""
    row = step.to_dict()
    scalars = {f"{group}/{key}": row[key] for group, keys in _GROUPS.items() for key in keys if key in row}
    for group in ("traffic_bytes", "cyclic"):
        scalars |= {f"{group}/{key}": value for key, value in row.get(group, {}).items()}
    for sync in row.get("syncs", ()):
        tag = f"fragment-{sync['fragment']}"
        scalars |= {f"sync/{key}/{tag}": value for key, value in sync.items() if key not in ("step", "fragment")}
    return scalars


class TensorBoardLogger(Logger):
    """Writes scalars in the groups train, speed, wire, traffic_bytes, memory, sync, cyclic and eval.

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

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        self._add_scalars(step.step, scalars_of(step))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        self._add_scalars(step, {f"eval/{name}": value for name, value in values.items()})

    def _add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step=step, summary=self._summary(value=values))

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


class WandbLogger(Logger):
    """Sends the same scalars to Weights & Biases, whose package reads its account and mode from the environment."""

    def __init__(self, log: LogConfig, job: Mapping[str, Any], folder: Path, *, after_step: int) -> None:
        """Begin a run of `job`, or after step `after_step` go on with the one that was begun in `folder`."""
        import wandb

        noted = folder / _WANDB_RUN
        run_id = noted.read_text().strip() if after_step and noted.is_file() else None
        settings = {"project": log.wandb_project, "name": log.wandb_name, "dir": str(folder)}
        self._run = wandb.init(**settings, config=job, id=run_id, resume="allow")
        noted.write_text(f"{self._run.id}\n")

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        self._run.log(scalars_of(step), step=step.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        self._run.log({f"eval/{name}": value for name, value in values.items()}, step=step)

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
        *([f"MFU {step.mfu:.1%}"] if step.mfu is not None else []),
        *([f"waited {step.data_s:.3f} s for data"] if step.data_s > _SHOWN_WAIT * step.step_s else []),
        _memory(step),
        *([f"loss scale {step.loss_scale:g}, {step.skipped_steps} skipped"] if step.loss_scale is not None else []),
    ]
    wire = step.interface_sent_bytes if step.interface_sent_bytes is not None else step.wire_bytes
    if wire is not None:
        parts.append(f"wire {wire / 1e6:.2f} MB")
    if step.wait_s is not None:
        parts.append(f"waited {step.wait_s:.3f} s for it")
    if step.cyclic is not None:
        parts.append(f"{step.cyclic.live_peak} stage activations, {step.cyclic.stagger_kept:.0%} on time")
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


class BarLogger(LineLogger):
    """Prints the lines of `LineLogger` above a bar that moves with every step."""

    def __init__(self, console: Console, *, total: int, every: int, start: int) -> None:
        super().__init__(console, total=total, every=every)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=total, completed=start, loss=math.nan)
        self._progress.start()

    def tick(self, step: int, loss: float) -> None:
        """See `Logger.tick`."""
        self._progress.update(self._task, completed=step, loss=loss)

    def close(self) -> None:
        """See `Logger.close`."""
        self._progress.stop()
