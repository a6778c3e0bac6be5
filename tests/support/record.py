"""The record of a benchmark: a section of RESULTS.md, which the next run replaces, and a JSON file beside it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.compare.machine import describe_machine, in_words
from laconic.compare.table import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"

_HEAD = """\
# Results

Every figure the documentation quotes, with the command that measures it. Running a command again replaces its section.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim beside a measurement."""

    key: str = ""
    """The name for `--rows`, which `Benchmark.row` writes."""
    claim: str
    """The measured quantity."""
    required: str
    """The value that the claim promises."""
    measured: str
    """The value that the benchmark found."""
    is_met: bool
    note: str = ""
    """The method of the measurement, and the reason for a shortfall."""
    tried: str = ""
    """The results of other settings that fell short."""
    date: str = ""
    """The day of the measurement."""
    command: str = ""
    """The command that measured the row."""


def ratio_row(*, claim: str, ratio: float, limit: float, note: str = "") -> Row:
    """Return the row of a ratio that must not exceed a limit."""
    required, measured = f"<= {limit:.2f}x", f"{ratio:.3f}x"
    return Row(claim=claim, required=required, measured=measured, is_met=ratio <= limit, note=note)


def rows_table(rows: Sequence[Row]) -> str:
    """Return the claims as a Markdown table with notes below."""
    cells = [[row.claim, row.required, row.measured, "yes" if row.is_met else "**no**"] for row in rows]
    table = markdown(("claim", "required", "measured", "met"), cells, num_text_columns=4)
    notes = [f"- *{row.claim}*: {_note(row)}" for row in rows if row.note or row.tried]
    return "\n".join([table, "", *notes])


def _note(row: Row) -> str:
    return f"{row.note} Tried before: {row.tried}" if row.tried else row.note


def write_section(title: str, body: str, path: Path = RESULTS) -> None:
    """Replace the section `## title` of `path`, or append it."""
    text = path.read_text(encoding="utf-8") if path.exists() else _HEAD
    section = f"## {title}\n\n{body.strip()}\n"
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        text = f"{text.rstrip()}\n\n{section}"
    else:
        rest = text[found.end() :]
        text = text[: found.start()] + section + (f"\n{rest}" if rest else "")
    path.write_text(text, encoding="utf-8")


class Record:
    """All known rows of one benchmark: the rows of this run, and of earlier runs if this run did not measure them."""

    def __init__(
        self, name: str, rows: Sequence[Row], order: Iterable[str], arguments: Sequence[str], *, module: str = ""
    ) -> None:
        """Read the rows of earlier runs.

        Args:
            name: the name of the benchmark.
            rows: the rows of this run.
            order: the keys of all rows, in the order of the table.
            arguments: the command line of this run.
            module: the module that `python -m` ran. Default: that of the name below `benchmarks`.
        """
        self._name, self._order = name, list(order)
        self._json = RESULTS.parent / "results" / f"{name}.json"
        self.machine: dict[str, Any] = describe_machine()
        self.known: dict[str, Any] = json.loads(self._json.read_text()) if self._json.exists() else {}
        """The content of the JSON file before this run."""
        command = shlex.join(["python", "-m", module or f"benchmarks.{name}", *arguments])
        now = {"date": self.machine["date"], "command": command}
        self._rows = {**self.known.get("rows", {}), **{row.key: dataclasses.asdict(row) | now for row in rows}}

    def save(self, *, about: str = "", more: Sequence[str] = (), **data: Any) -> None:
        """Write the JSON file and the section.

        Args:
            about: text for the first line of the section, before the machine.
            more: paragraphs below the table.
            data: more keys of the JSON file.
        """
        self._json.parent.mkdir(exist_ok=True)
        report = {"machine": self.machine, "rows": self._rows, **data}
        self._json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        shown = [Row(**self._rows[key]) for key in self._order if key in self._rows]
        body = [f"{self._commands(shown)}; {about}{in_words(self.machine)}.", rows_table(shown), *more]
        write_section(self._name, "\n\n".join(body), RESULTS)

    def _commands(self, rows: list[Row]) -> str:
        """Return each command with its date, and with its rows if there are several commands."""
        runs: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            runs.setdefault((row.command, row.date), []).append(row.key)
        if len(runs) == 1:
            return ", ".join(f"`{command}`, {date}" for command, date in runs)
        return "; ".join(f"`{command}`, {date} ({', '.join(keys)})" for (command, date), keys in runs.items())
