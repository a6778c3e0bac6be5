"""The record: results/SECTION.json has the rows of a benchmark, and results/SECTION-NAME.csv are its tables.

python -m tests.support.record    prints the rows that are older than the code that they measure, and their commands
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import hashlib
import json
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from laconic.compare.machine import describe_machine, in_words
from laconic.compare.markdown import markdown
from tests.support import targets

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "results"
SOURCES = _ROOT / "src"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured quantity."""

    key: str = ""
    """The name for `--rows`, which `Benchmark.row` writes."""
    claim: str
    """The measured quantity."""
    measured: str
    """The value that the benchmark found."""
    note: str = ""
    """The method of the measurement, and the reason for what falls short."""
    tried: str = ""
    """The results of other settings that fell short."""
    runs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The seconds of each run, by what ran, where the value is a ratio of their medians."""
    date: str = ""
    """The day of the measurement."""
    command: str = ""
    """The command that measured the row."""
    machine: str = ""
    """The machine and the software of the measurement, in words."""
    commit: str = ""
    """The commit of the sources, with a plus if files had changed since."""
    measures: tuple[str, ...] = ()
    """The packages whose code the row measures; of its benchmark, unless it says others. On record: their modules that
    were imported."""
    code: str = ""
    """The digest of that code: see `code_digest`."""


def ratio_row(*, claim: str, ratio: float, note: str = "", runs: Mapping[str, Sequence[float]] | None = None) -> Row:
    """Return the row of a ratio."""
    return Row(claim=claim, measured=f"{ratio:.3f}x", note=note, runs=runs or {})


def rows_table(rows: Mapping[tuple[str, str], Row]) -> str:
    """Return rows, by section and key, as a Markdown table beside their targets, with notes below."""
    cells = [[row.claim, row.measured, *_kept(section, row)] for (section, _), row in rows.items()]
    table = markdown(("claim", "measured", "target", "kept"), cells, num_text_columns=4)
    notes = [f"- *{row.claim}*: {note_of(row)}" for row in rows.values() if row.note or row.tried]
    return "\n".join([table, "", *notes])


def _kept(section: str, row: Row) -> tuple[str, str]:
    target = targets.of(section, row.key)
    return (target, "yes" if keeps_its_target(section, row) else "**no**") if target else ("", "")


def keeps_its_target(section: str, row: Row) -> bool:
    """True if no number of a row is outside the bounds of its target, or if it has none."""
    target = targets.of(section, row.key)
    return target is None or not targets.missed(target, row.measured)


def note_of(row: Row) -> str:
    """The note, with what was tried before."""
    return f"{row.note} Tried before: {row.tried}" if row.tried else row.note


def recorded(section: str) -> dict[str, Any]:
    """The content of a section's file; empty if there is none."""
    path = RESULTS / f"{section}.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known


def recorded_rows() -> dict[tuple[str, str], Row]:
    """All rows on record, by section and key."""
    sections = sorted(path.stem for path in RESULTS.glob("*.json"))
    return {(name, key): Row(**row) for name in sections for key, row in recorded(name)["rows"].items()}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of raw figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        """The table for a screen; its first column is text."""
        shown = markdown(tuple(self.columns), [list(row) for row in self.rows], num_text_columns=1)
        return f"{self.caption}\n\n{shown}" if self.caption else shown


class Record:
    """All known rows of one section: the rows of this run, and of earlier runs if this run did not measure them."""

    def __init__(
        self, name: str, rows: Sequence[Row], order: Iterable[str], arguments: Sequence[str], *, module: str = "",
        measures: Sequence[str], imported: Iterable[str],
    ) -> None:  # fmt: skip
        """Read the rows of earlier runs.

        Args:
            name: the section.
            rows: the rows of this run.
            order: the keys of the rows, in the order of the file; those of the section that it lacks come after them.
            arguments: the command line of this run.
            module: the module that `python -m` ran. Default: that of the name below `benchmarks`.
            measures: the packages whose code the rows measured.
            imported: the modules that this run imported: see `tests.support.imported`.
        """
        self.name, imported = name, set(imported)
        self.known = recorded(name)
        """The content of the JSON file before this run."""
        self.machine: dict[str, Any] = describe_machine()
        now = {
            "date": self.machine["date"], "machine": in_words(self.machine), "commit": _commit(),
            "command": shlex.join(["python", "-m", module or f"benchmarks.{name}", *arguments]),
        }  # fmt: skip
        found = {**self.known.get("rows", {})}
        for row in rows:
            modules = modules_of(row.measures or measures, imported)
            found[row.key] = dataclasses.asdict(row) | now | {"measures": modules, "code": code_digest(modules)}
        self._rows = {key: found[key] for key in (*(key for key in order if key in found), *found)}

    def save(self, tables: Mapping[str, Table] | None = None, **data: Any) -> None:
        """Write the JSON file, with `data` beside its rows, and a CSV file for each table, by name."""
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps({"rows": self._rows, **data}, indent=1)
        (RESULTS / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        for name, table in (tables or {}).items():
            with (RESULTS / f"{self.name}-{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([table.columns, *table.rows])


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no", "src"))


# -- which rows are old ------------------------------------------------------------------------------------------------


@cache
def _digest_of_file(path: Path) -> str:
    """The digest of a module's code, without comments, docstrings and the form of its lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def modules_of(packages: Sequence[str], imported: Iterable[str]) -> list[str]:
    """Those of the imported modules that are in packages."""
    return sorted(name for name in imported if any(f"{name}.".startswith(f"{package}.") for package in packages))


def code_digest(modules: Sequence[str]) -> str:
    """The digest of the code of modules and of whole packages; empty if there are none.

    Raises:
        ValueError: there is no such module.
    """
    files: set[Path] = set()
    for name in modules:
        path = SOURCES / name.replace(".", "/")
        found = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        if not found or not found[0].exists():
            raise ValueError(
                f"no module {name!r} below {SOURCES}; a benchmark's `measures` names modules of the library"
            )
        files.update(found)
    parts = [f"{path.relative_to(SOURCES).as_posix()} {_digest_of_file(path)}" for path in sorted(files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


STUDIES = "studies"
"""The section of rows whose scripts are gone: they stay as they are."""


def is_old(row: Row) -> bool:
    """True if code that the row measured has changed, or is gone."""
    try:
        return not row.code or row.code != code_digest(row.measures)
    except ValueError:
        return True


def main() -> None:
    """Print the rows that are older than the code that they measure."""
    rows = recorded_rows()
    old: dict[tuple[str, str], list[str]] = {}
    for (section, key), row in rows.items():
        if section != STUDIES and is_old(row):
            old.setdefault((row.command.partition(" --rows")[0], row.date), []).append(key)
    count = sum(map(len, old.values()))
    print(
        f"{count} of {len(rows)} recorded rows are older than the code that they measure:" if count else "no row is old"
    )
    for (command, date), keys in sorted(old.items(), key=lambda each: each[0][1]):
        print(f"  {date}  {command} --rows {','.join(keys)}")


if __name__ == "__main__":
    main()
