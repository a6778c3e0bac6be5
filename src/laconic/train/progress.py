"""Loggers for a person who watches a run: a bar on a terminal, plain lines elsewhere."""

import math
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from laconic.train.loggers import Logger
from laconic.train.records import ClusterStep, SyncMetrics

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
    """Prints a line after step 1, every `every` steps and the last one, and a line about the latest sync of islands."""

    def __init__(self, console: Console, *, total: int, every: int) -> None:
        self._console, self._total, self._every = console, total, every
        self._last_sync: SyncMetrics | None = None

    def step(self, step: ClusterStep) -> None:
        """See `Logger.step`."""
        if step.syncs:
            self._last_sync = step.syncs[-1]
        if step.step % self._every == 0 or step.step in (1, self._total):
            self._print(describe_step(step, self._total))
            if self._last_sync is not None:
                self._print(describe_sync(self._last_sync, self._total))
                self._last_sync = None

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        shown = " | ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self._print(f"step {step:>{len(str(self._total))}}/{self._total} | {shown}")

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
