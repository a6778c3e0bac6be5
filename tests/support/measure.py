"""The command line of every benchmark. It measures the chosen rows, and records each row as soon as it is measured."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tests.support.record import Record, Row, rows_table

B = TypeVar("B")


class BenchmarkError(RuntimeError):
    """The benchmark cannot run on this machine; the message names the reason and a remedy."""


class Options(argparse.Namespace):
    """The options of a benchmark's command."""

    rows: list[str]
    """The keys of the rows to measure, in the order of the table."""
    quick: bool
    """Whether to measure small jobs, and to record nothing."""
    out: Path
    """The folder for the files of the runs."""


def _save_rows(record: Record, bench: object) -> None:
    record.save()


def _no_details(bench: object) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[B]):
    """A table of claims, and the command that measures them."""

    name: str
    """The title of its section in RESULTS.md, and the name of its JSON file."""
    doc: str | None
    """The description that `--help` shows."""
    rows: Mapping[str, Callable[[B], Row]]
    """The function that measures each row, by key, in the order of the table."""
    prepare: Callable[[Options], AbstractContextManager[B]]
    """The function that opens the state that all rows share. It may raise a BenchmarkError."""
    save: Callable[[Record, B], None] = _save_rows
    """The function that writes the record, and further measurements if the benchmark has any."""
    module: str = ""
    """The module that `python -m` runs. Default: that of the name below `benchmarks`."""
    details: Callable[[B], str] = _no_details
    """The function that returns text to print below the table."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure the rows that the command line names; return 1 if one of them failed.

        Every row that is measured is recorded at once, because a later row may fail. A row that fails shows its
        traceback, and the other rows go on.
        """
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        options = self._parse(arguments)
        rows, failed = [], []
        with contextlib.ExitStack() as stack:
            options.out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                bench = stack.enter_context(self.prepare(options))
            except BenchmarkError as error:
                print(f"{self.module or f'benchmarks.{self.name}'}: {error}", file=sys.stderr)
                return 1
            for key in options.rows:
                print(f"{key} ...", file=sys.stderr, flush=True)
                try:
                    rows.append(self.rows[key](bench))
                except Exception:  # of any kind: a row that fails must not cost the rows after it
                    traceback.print_exc()
                    failed.append(key)
                    continue
                if not options.quick:
                    self.save(Record(self.name, rows, self.rows, arguments, module=self.module), bench)
            print(f"\n{rows_table(rows)}\n\n{self.details(bench)}".rstrip())
        if failed:
            print(f"{self.module or f'benchmarks.{self.name}'}: rows that failed: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0

    def _parse(self, arguments: Sequence[str]) -> Options:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module or f'benchmarks.{self.name}'}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"rows: {', '.join(self.rows)}",
        )
        parser.add_argument("--rows", default=",".join(self.rows), metavar="A,B,...", help="default: all")
        parser.add_argument("--quick", action="store_true", help="measure small jobs, and record nothing")
        parser.add_argument("--out", type=Path, metavar="DIR", help="keep the files of the runs here")
        options = parser.parse_args(arguments, namespace=Options())
        chosen = str(options.rows).split(",")
        for key in chosen:
            if key not in self.rows:
                parser.error(f"there is no row {key!r}; there are {', '.join(self.rows)}")
        options.rows = [key for key in self.rows if key in chosen]
        return options
