"""The progress of a comparison on the screen: the time of the run under way, and a row of the table after each."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from laconic.compare.case import Case
from laconic.compare.result import Result
from laconic.compare.table import ScreenTable


class ConsoleReporter:
    """The receiver of a comparison's progress: it prints a row of `table` after each run.

    A terminal shows the run and its time meanwhile. `console` is this process's stdout by default. `num_runs` is the
    number of all runs, if the caller knows it.
    """

    def __init__(
        self, console: Console | None = None, table: ScreenTable | None = None, *, num_runs: int | None = None
    ) -> None:
        self._console, self._table = console or Console(), table or ScreenTable()
        self._num_runs_suffix = f"/{num_runs}" if num_runs else ""
        self._num_started = 0

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        """Show that a run is under way while the body runs."""
        self._num_started += 1
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        # `transient`: it disappears, and the row of the result takes its place
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as shown:
            shown.add_task(f"[{self._num_started}{self._num_runs_suffix}] {case.label}, {case.steps} steps", total=None)
            yield

    def finished(self, result: Result) -> None:
        """Show the result of a run."""
        for line in self._table.add(result):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
