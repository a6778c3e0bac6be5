"""What benchmarks of claims share: a command line that chooses rows, and each row kept as soon as it is measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from record import Row

B = TypeVar("B")


class Options(argparse.Namespace):
    """What was asked for."""

    rows: list[str]
    quick: bool
    out: Path
    """For the runs' own folders; of benchmarks that have some."""


def options_of(doc: str | None, known: Iterable[str], *, quick: str, out: Path | None = None) -> Options:
    """Read the command line; `quick` says what that flag makes of the jobs, `out` is where runs go if not told."""
    names = list(known)
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"rows: {', '.join(names)}"
    )
    parser.add_argument("--rows", default=",".join(names), metavar="A,B,...", help="which to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{quick}; prints, records nothing")
    if out is not None:
        parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="for the runs' own folders")
    options = parser.parse_args(namespace=Options())
    chosen = str(options.rows).split(",")
    for name in chosen:
        if name not in names:
            parser.error(f"there is no row {name!r}; there are {', '.join(names)}")
    options.rows = [name for name in names if name in chosen]
    return options


def measure(
    rows: Mapping[str, Callable[[B], Row]], options: Options, bench: B, record: Callable[[list[Row]], None]
) -> list[Row]:
    """Measure the rows asked for; all that are known so far are recorded after each, as a later one may fail."""
    found: list[Row] = []
    for name in options.rows:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found.append(rows[name](bench))
        if not options.quick:
            record(found)
    return found
