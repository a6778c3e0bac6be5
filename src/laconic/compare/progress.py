"""The progress of a comparison on the screen: the time of the run under way, and a line after each."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from laconic.compare.case import Case
from laconic.compare.result import Result
from laconic.compare.table import ScreenTable


class ConsoleReporter:
    """The receiver of a comparison's progress: it prints a line before and after each run.

    With a `table` it prints a row of it after each run, and nothing before. A terminal shows the run and its time
    meanwhile, in place of the first line. `console` is this process's stdout by default. `num_runs` is the number of
    all runs, if the caller knows it.
    """

    def __init__(
        self, console: Console | None = None, *, table: ScreenTable | None = None, num_runs: int | None = None
    ) -> None:
        self._console, self._table = console or Console(), table
        self._num_runs_suffix = f"/{num_runs}" if num_runs else ""
        self._num_started = 0

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        """Show that a run is under way while the body runs."""
        self._num_started += 1
        if not self._console.is_terminal and self._table is None:
            self._print(f"{self._name(case)}: {case.steps} steps ...")
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        # `transient`: it disappears, and the line about the result takes its place
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as shown:
            shown.add_task(f"{self._name(case)}, {case.steps} steps", total=None)
            yield

    def finished(self, case: Case, result: Result) -> None:
        """Show the result of a run."""
        if self._table is not None:
            for line in self._table.add(result):
                self._print(line)
            return
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
