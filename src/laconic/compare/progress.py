"""What a person sees while a comparison runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from laconic.compare.case import Case
from laconic.compare.result import Result


class Reporter:
    """Is told everything and does nothing."""

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        """Around a run."""
        yield

    def step(self, step: int, loss: float, step_s: float) -> None:
        """The run has taken a step; called from a thread."""

    def finished(self, case: Case, result: Result) -> None:
        """The run went well."""


def describe(result: Result) -> str:
    """A run in half a line."""
    parts = [f"{result.step_s:.3f} s per step"]
    moved = result.wire_bytes if result.wire_bytes is not None else result.counted_bytes
    if moved is not None:
        parts.append(f"{moved / 1e6:.2f} MB on the wire per node and step")
    parts.append(f"loss {result.loss:.4f}")
    return ", ".join(parts)


class LineReporter(Reporter):
    """One line before each run and one after."""

    def __init__(self, console: Console, *, num_runs: int | None = None) -> None:
        self._console = console
        self._num_runs = num_runs
        self._started = 0

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        self._started += 1
        self._say(f"{self._position()} {case.label}: {case.steps} steps ...")
        yield

    def finished(self, case: Case, result: Result) -> None:
        self._say(f"{self._position()} {case.label}: {describe(result)} ({result.wall_s:.0f} s in all)")

    def _position(self) -> str:
        return f"[{self._started}/{self._num_runs}]" if self._num_runs else f"[{self._started}]"

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class BarReporter(LineReporter):
    """A bar that moves with every step, and a line when it is done."""

    def __init__(self, console: Console, *, num_runs: int | None = None) -> None:
        super().__init__(console, num_runs=num_runs)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        self._started += 1
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        # `transient`: the bar makes room for the line about the result
        with Progress(*columns, console=self._console, transient=True) as progress:
            description = f"{self._position()} {case.label}"
            self._task = progress.add_task(description, total=case.steps, note="starting")
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    def step(self, step: int, loss: float, step_s: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, note=f"loss {loss:.3f}, {step_s:.2f} s per step")


def make_reporter(*, num_runs: int | None = None, console: Console | None = None) -> Reporter:
    """A bar where there is a terminal."""
    console = console or Console()
    return (BarReporter if console.is_terminal else LineReporter)(console, num_runs=num_runs)
