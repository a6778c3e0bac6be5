"""Writes what a benchmark showed into RESULTS.md: one section per benchmark, replaced when it is run again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
    date: str = ""
    """Of the measurement."""


def rows_table(rows: list[Row]) -> str:
    """The claims as Markdown, notes below."""
    cells = [[row.claim, row.required, row.measured, "yes" if row.is_met else "**no**"] for row in rows]
    table = markdown(("claim", "required", "measured", "met"), cells, num_text_columns=4)
    notes = [f"- *{row.claim}*: {row.note}" for row in rows if row.note]
    return "\n".join([table, "", *notes])


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
