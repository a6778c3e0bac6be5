"""The record of a benchmark: a section of RESULTS.md, which the next run replaces, and a JSON file beside it.

python -m tests.support.record    prints the rows that are older than the code that they measure, and their commands
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from laconic.compare.machine import describe_machine, in_words
from laconic.compare.markdown import markdown

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "RESULTS.md"
SOURCES = _ROOT / "src"


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
    machine: str = ""
    """The machine and the software of the measurement, in words."""
    measures: tuple[str, ...] = ()
    """The modules and packages whose code the row measured; of its benchmark, unless it says others."""
    code: str = ""
    """The digest of that code: see `code_digest`."""


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
    text = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    section = f"## {title}\n\n{body.strip()}\n"
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        text = f"{text.rstrip()}\n\n{section}"
    else:
        rest = text[found.end() :]
        text = text[: found.start()] + section + (f"\n{rest}" if rest else "")
    path.write_text(text, encoding="utf-8")


_HEAD = """\
# Results

Every figure that the documentation quotes, with the command that measures it; running it again replaces its rows.
`python -m tests.faults` measures the rows of trust, mend, parity and device. Of {num} claims {num_short} fall short:

{short}

The claims on which most users decide, as measured:

{chosen}

**No cluster of GPUs has run laconic yet**; an H200 and an H100 have, each alone: [gpu](#gpu). Sections: {sections}.
"""
HEADLINES = (
    ("wire", "wire-full"), ("thinner", "bytes"), ("wire", "device-memory"), ("thinner", "seconds"), ("wire", "losses"),
    ("thinner", "paired"), ("trust", "kills"), ("trust", "races"), ("gpu", "policies"), ("gpu", "step-plain"),
    ("gpu", "step-fsdp2"),
)  # fmt: skip
"""The section and the key of the claims on which users decide."""


def recorded_rows() -> dict[tuple[str, str], Row]:
    """All rows on record, by section and key, in the order of RESULTS.md's sections."""
    files = sorted((RESULTS.parent / "results").glob("*.json"))
    known = {file.stem: json.loads(file.read_text(encoding="utf-8"))["rows"] for file in files}
    order = [name for name in _sections() if name in known]
    return {(name, key): Row(**row) for name in order for key, row in known[name].items()}


def _sections() -> list[str]:
    return re.findall(r"^## (.+)$", RESULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)


def write_head(path: Path | None = None) -> None:
    """Write what RESULTS.md, or `path`, opens with: shortfalls, the claims that matter, and the sections."""
    path = path or RESULTS  # which tests replace
    rows = recorded_rows()
    short = [(section, row) for (section, _), row in rows.items() if not row.is_met]
    chosen = [(section, rows[section, key]) for section, key in HEADLINES if (section, key) in rows]
    links = [f"[{name}](#{re.sub(r'[^a-z0-9_ -]', '', name.lower()).replace(' ', '-')})" for name in _sections()]
    head = _HEAD.format(
        num=len(rows), num_short=len(short), sections=", ".join(links),
        short="\n".join(_headline(*each) for each in short), chosen="\n".join(_headline(*each) for each in chosen),
    )  # fmt: skip
    text = path.read_text(encoding="utf-8")
    path.write_text(head + text[text.index("\n## ") :], encoding="utf-8")


def _headline(section: str, row: Row) -> str:
    return f"- {section}: {row.claim}: **{row.measured}** (required: {row.required})"


class Record:
    """All known rows of one benchmark: the rows of this run, and of earlier runs if this run did not measure them."""

    def __init__(
        self, name: str, rows: Sequence[Row], order: Iterable[str], arguments: Sequence[str], *, module: str = "",
        measures: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Read the rows of earlier runs.

        Args:
            name: the name of the benchmark.
            rows: the rows of this run.
            order: the keys of the rows, in the order of the table; those of the section that it lacks come after them.
            arguments: the command line of this run.
            module: the module that `python -m` ran. Default: that of the name below `benchmarks`.
            measures: the modules and packages whose code the rows measured.
        """
        self.name, self._order = name, list(order)
        self._json = RESULTS.parent / "results" / f"{name}.json"
        self.machine: dict[str, Any] = describe_machine()
        self.known: dict[str, Any] = json.loads(self._json.read_text()) if self._json.exists() else {}
        """The content of the JSON file before this run."""
        command = shlex.join(["python", "-m", module or f"benchmarks.{name}", *arguments])
        own = {row.key: row.measures or measures for row in rows}
        now = {"date": self.machine["date"], "command": command, "machine": in_words(self.machine)}
        new = {
            row.key: dataclasses.asdict(row) | now | {"measures": own[row.key], "code": code_digest(own[row.key])}
            for row in rows
        }
        before = in_words(self.known["machine"]) if self.known else ""  # of rows that do not say their machine
        self._rows = {**{key: {"machine": before} | row for key, row in self.known.get("rows", {}).items()}, **new}
        self._order += [key for key in self._rows if key not in self._order]

    def save(self, *, more: Sequence[str] = (), **data: Any) -> None:
        """Write the JSON file and the section, with paragraphs `more` below the table; `data` is for the JSON file."""
        self._json.parent.mkdir(exist_ok=True)
        report = {"machine": self.machine, "rows": self._rows, **data}
        self._json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        shown = [Row(**self._rows[key]) for key in self._order if key in self._rows]
        machines = dict.fromkeys(row.machine for row in shown)
        body = [_commands(shown, machine) for machine in machines] + [rows_table(shown), *more]
        write_section(self.name, "\n\n".join(body), RESULTS)
        write_head()


def _commands(rows: Sequence[Row], machine: str) -> str:
    """Return each command on a machine with its date, and with its rows if there are several."""
    runs: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.machine == machine:
            runs.setdefault((row.command, row.date), []).append(row.key)
    is_one = len(runs) == 1 and all(row.machine == machine for row in rows)
    told = [
        f"`{command}`, {date}" + ("" if is_one else f" ({', '.join(keys)})") for (command, date), keys in runs.items()
    ]
    return f"{'; '.join(told)}; {machine}."


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


def code_digest(modules: Sequence[str]) -> str:
    """The digest of the code of modules and packages; empty if there are none.

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


_OLD_NAMES = dict.fromkeys(("trust", "mend", "parity"), "python -m tests.faults")
"""The command of sections whose rows may name a module that is gone."""
_ONCE = "measured-once"
"""The section of rows whose scripts are gone: they stay as they are."""


def _is_old(row: Row) -> bool:
    try:
        return not row.code or row.code != code_digest(row.measures)
    except ValueError:  # a module is gone that it measured
        return True


def main() -> None:
    """Print the rows that are older than the code that they measure."""
    rows = recorded_rows()
    old: dict[tuple[str, str], list[str]] = {}
    for (section, key), row in rows.items():
        if section != _ONCE and _is_old(row):
            old.setdefault((_OLD_NAMES.get(section, row.command.partition(" --rows")[0]), row.date), []).append(key)
    count = sum(map(len, old.values()))
    print(
        f"{count} of {len(rows)} recorded rows are older than the code that they measure:" if count else "no row is old"
    )
    for (command, date), keys in sorted(old.items(), key=lambda each: each[0][1]):
        print(f"  {date}  {command} --rows {','.join(keys)}")


if __name__ == "__main__":
    main()
