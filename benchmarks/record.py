"""Writes what a benchmark showed into RESULTS.md: one section per benchmark, replaced when it is run again."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.compare.machine import describe_machine, in_words
from laconic.compare.table import markdown

RESULTS = Path(__file__).with_name("RESULTS.md")

_HEAD = """\
# Results

Every figure the documentation quotes, with the script that measures it. Running a script again replaces its section.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim, held to a measurement."""

    key: str
    """Name for `--rows`."""
    claim: str
    """What is measured."""
    required: str
    """What it must be."""
    measured: str
    """What it was."""
    is_met: bool
    note: str = ""
    """How it was measured, and the reason for a shortfall."""
    tried: str = ""
    """What other settings gave before, where that fell short."""
    date: str = ""
    """Of the measurement."""
    command: str = ""
    """That measured it."""


def rows_table(rows: list[Row]) -> str:
    """The claims as Markdown, notes below."""
    cells = [[row.claim, row.required, row.measured, "yes" if row.is_met else "**no**"] for row in rows]
    table = markdown(("claim", "required", "measured", "met"), cells, num_text_columns=4)
    notes = [f"- *{row.claim}*: {_told(row)}" for row in rows if row.note or row.tried]
    return "\n".join([table, "", *notes])


def _told(row: Row) -> str:
    return f"{row.note} Tried before: {row.tried}" if row.tried else row.note


def write_section(title: str, body: str, path: Path = RESULTS) -> None:
    """Replace the section `## title` of `path`, or add it at the end."""
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
    """What a script has shown: the rows of this run, beside those it measured before; JSON, and from it RESULTS.md."""

    def __init__(self, script: str, rows: Sequence[Row], order: Iterable[str]) -> None:
        """`order`: keys of all rows of the table."""
        self._script, self._order = script, list(order)
        self._json = RESULTS.parent / "results" / f"{Path(script).stem}.json"
        self.machine: dict[str, Any] = describe_machine()
        self.known: dict[str, Any] = json.loads(self._json.read_text()) if self._json.exists() else {}
        """The file as it was, with whatever else the script keeps in it."""
        command = shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]])
        now = {"date": self.machine["date"], "command": command}
        self._rows = {**self.known.get("rows", {}), **{row.key: dataclasses.asdict(row) | now for row in rows}}

    def save(self, *, about: str = "", more: Sequence[str] = (), **data: Any) -> None:
        """Write the JSON, with `data` beside the rows, and the section: `about` in its first line, `more` below."""
        self._json.parent.mkdir(exist_ok=True)
        report = {"machine": self.machine, "rows": self._rows, **data}
        self._json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        shown = [Row(**self._rows[key]) for key in self._order if key in self._rows]
        body = [f"{self._commands(shown)}; {about}{in_words(self.machine)}.", rows_table(shown), *more]
        write_section(self._script, "\n\n".join(body), RESULTS)

    def _commands(self, rows: list[Row]) -> str:
        """Each command with its date, and its rows if there is more than one command."""
        runs: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            runs.setdefault((row.command, row.date), []).append(row.key)
        if len(runs) == 1:
            return ", ".join(f"`{command}`, {date}" for command, date in runs)
        return "; ".join(f"`{command}`, {date} ({', '.join(keys)})" for (command, date), keys in runs.items())
