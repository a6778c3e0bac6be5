"""The progress of a comparison on the screen: a moving bar for the run under way, and a row of a table after each."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from laconic.compare.case import Case
from laconic.compare.result import Result
from laconic.compare.table import ScreenTable


class Reporter:
    """The receiver of a comparison's progress. This base class shows nothing."""

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        """Show that a run is under way while the body runs."""
        yield

    def step(self, step: int, loss: float, step_s: float) -> None:
        """Show that the run has taken `step` steps. A thread calls this, perhaps after the end of `running`."""

    def finished(self, case: Case, result: Result) -> None:
        """Show the result of a run."""


class ConsoleReporter(Reporter):
    """A reporter that prints a line before and after each run. A terminal shows a moving bar instead of the first.

    `console` is this process's stdout by default. `num_runs` is the number of all runs, if the caller knows it.
    """

    def __init__(self, console: Console | None = None, *, num_runs: int | None = None) -> None:
        self._console = console or Console()
        self._num_runs_suffix = f"/{num_runs}" if num_runs else ""
        self._num_started = 0
        self._task: tuple[Progress, TaskID] | None = None

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        """See `Reporter.running`."""
        self._num_started += 1
        has_bar = self._console.is_terminal
        if not has_bar:
            self._announce(case)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        # `transient`: the bar disappears, and the line about the result takes its place
        with Progress(*columns, console=self._console, transient=True, disable=not has_bar) as progress:
            self._task = progress, progress.add_task(self._name(case), total=case.steps, note="starting")
            try:
                yield
            finally:
                self._task = None

    def _announce(self, case: Case) -> None:
        self._print(f"{self._name(case)}: {case.steps} steps ...")

    def step(self, step: int, loss: float, step_s: float) -> None:
        """See `Reporter.step`."""
        if task := self._task:
            task[0].update(task[1], completed=step, note=f"loss {loss:.3f}, {step_s:.2f} s per step")

    def finished(self, case: Case, result: Result) -> None:
        """See `Reporter.finished`."""
        moved = result.moved_bytes
        wire = f"{moved / 1e6:.2f} MB on the wire per node and step, " if moved is not None else ""
        self._print(
            f"{self._name(case)}: {result.step_s:.3f} s per step, {wire}loss {result.loss:.4f} "
            f"({result.wall_s:.0f} s in all)"
        )

    def _name(self, case: Case) -> str:
        return f"[{self._num_started}{self._num_runs_suffix}] {case.label}"

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class TableReporter(ConsoleReporter):
    """A reporter that adds a row to a table after each run, and shows nothing before it but a terminal's moving bar."""

    def __init__(self, console: Console, table: ScreenTable, *, num_runs: int) -> None:
        super().__init__(console, num_runs=num_runs)
        self._table = table

    def _announce(self, case: Case) -> None:
        """Say nothing: the row that comes names the run."""

    def finished(self, case: Case, result: Result) -> None:
        """See `Reporter.finished`."""
        for line in self._table.add(result):
            self._print(line)
