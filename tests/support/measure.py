"""The command line of every benchmark. It measures the chosen rows, and records each as soon as it is measured."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from tests.support.imported import collected
from tests.support.record import Record, Row, rows_table

B = TypeVar("B")


class BenchmarkError(RuntimeError):
    """The benchmark cannot run on this machine; the message names the reason and a remedy."""


class Options(argparse.Namespace):
    """The options of a benchmark's command."""

    rows: list[str]
    """The keys of the rows to measure."""
    quick: bool
    """Whether to measure small jobs, and to record nothing."""
    out: Path
    """The folder for the files of the runs; it exists."""
    keeps: bool
    """Whether that folder stays, since the command line names it."""


@dataclass(kw_only=True)
class Benchmark(Generic[B]):
    """A table of claims, and the command that measures them. The functions that measure rows register with `row`."""

    name: str
    """The section of its rows, and the name of its JSON file."""
    prepare: Callable[[Options], B | AbstractContextManager[B]]
    """The function that makes the state that all rows share. It may raise a BenchmarkError."""
    module: str = ""
    """The module that `python -m` runs. Default: that of the name below `benchmarks`."""
    measures: tuple[str, ...]
    """The modules and packages whose code the figures hang on: a row is older than a change of it."""
    save: Callable[[Record, B], None] = lambda record, bench: record.save()
    """The function that writes the record, and further measurements if the benchmark has any."""
    details: Callable[[B], str] = lambda bench: ""
    """The function that returns text to print below the table."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """The function that adds the benchmark's own options, such as sizes; they come to `prepare` with the others."""
    rows: dict[str, Callable[[B], Row]] = field(default_factory=dict)
    """The function that measures each row, by key, in the order of the table."""
    sections: dict[str, str] = field(default_factory=dict)
    """The section of each row that is not in the section `name`."""

    def __post_init__(self) -> None:
        self.module = self.module or f"benchmarks.{self.name}"

    def row(self, key: str, *, section: str = "") -> Callable[[Callable[[B], Row]], Callable[[B], Row]]:
        """Register the function below as the one that measures the row `key`."""
        if key in self.rows:
            raise ValueError(f"{self.module} has two rows {key!r}")

        def register(measure: Callable[[B], Row]) -> Callable[[B], Row]:
            def keyed(bench: B) -> Row:
                return dataclasses.replace(measure(bench), key=key)

            self.rows[key] = keyed
            if section:
                self.sections[key] = section
            return keyed

        return register

    def main(self, arguments: Sequence[str] | None = None, *, doc: str | None = None) -> int:
        """Measure the rows that the command line names; return 1 if one of them failed.

        Every row that is measured is recorded at once, because a later row may fail. A row that fails shows its
        traceback, and the other rows go on. `doc` is the description for `--help`.
        """
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        options = self._parse(arguments, doc)
        rows: dict[tuple[str, str], Row] = {}
        failed = []
        with contextlib.ExitStack() as stack:
            imported = stack.enter_context(collected())
            options.keeps = options.out is not None
            options.out = (options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
            options.out.mkdir(parents=True, exist_ok=True)
            try:
                prepared = self.prepare(options)
                is_open = isinstance(prepared, AbstractContextManager)
                bench: B = stack.enter_context(prepared) if is_open else prepared  # type: ignore[assignment,arg-type]
            except BenchmarkError as error:
                print(f"{self.module}: {error}", file=sys.stderr)
                return 1
            for key in options.rows:
                print(f"{key} ...", file=sys.stderr, flush=True)
                section = self.sections.get(key, self.name)
                try:
                    rows[section, key] = self.rows[key](bench)
                except Exception:  # of any kind: a row that fails must not cost the rows after it
                    traceback.print_exc()
                    failed.append(key)
                    continue
                if not options.quick:
                    own = [row for (other, _), row in rows.items() if other == section]
                    self.save(self.record(section, own, arguments, imported()), bench)
            print(f"\n{rows_table(rows)}\n\n{self.details(bench)}".rstrip())
        if failed:
            print(f"{self.module}: rows that failed: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0

    def record(self, section: str, rows: Sequence[Row], arguments: Sequence[str], imported: Iterable[str]) -> Record:
        """The record of rows of a section that a command has measured."""
        return Record(
            section, rows, self.rows, arguments, module=self.module, measures=self.measures, imported=imported
        )

    def _parse(self, arguments: Sequence[str], doc: str | None) -> Options:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"rows: {', '.join(self.rows)}",
        )
        parser.add_argument("--rows", default=",".join(self.rows), metavar="A,B,...", help="default: all")
        parser.add_argument("--quick", action="store_true", help="measure small jobs, and record nothing")
        parser.add_argument("--out", type=Path, metavar="DIR", help="keep the files of the runs here")
        self.add_options(parser)
        options = parser.parse_args(arguments, namespace=Options())
        chosen = str(options.rows).split(",")
        for key in chosen:
            if key not in self.rows:
                parser.error(f"there is no row {key!r}; there are {', '.join(self.rows)}")
        options.rows = [key for key in self.rows if key in chosen]
        return options
