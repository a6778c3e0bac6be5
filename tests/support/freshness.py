"""Which recorded figures are older than the code that they measure.

python -m tests.support.freshness    prints them, and how to measure them again
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
_OLD_NAMES = dict.fromkeys(("trust", "mend", "parity"), "python -m tests.faults")
"""The command of sections whose rows may name a module that is gone."""


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


def code_digest(modules: Sequence[str], sources: Path = SOURCES) -> str:
    """The digest of the code of modules and packages; empty if there are none.

    Raises:
        ValueError: there is no such module.
    """
    files: set[Path] = set()
    for name in modules:
        path = sources / name.replace(".", "/")
        found = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        if not found or not found[0].exists():
            raise ValueError(
                f"no module {name!r} below {sources}; a benchmark's `measures` names modules of the library"
            )
        files.update(found)
    parts = [f"{path.relative_to(sources).as_posix()} {_digest_of_file(path)}" for path in sorted(files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


def main() -> int:
    """Print the rows that are older than the code they measure."""
    from tests.support.record import recorded_rows  # which computes digests itself

    rows = recorded_rows()
    old: dict[tuple[str, str], list[str]] = {}
    for (section, key), row in rows.items():
        if not row.code or row.code != code_digest(row.measures):
            old.setdefault((_OLD_NAMES.get(section, row.command.partition(" --rows")[0]), row.date), []).append(key)
    count = sum(map(len, old.values()))
    print(
        f"{count} of {len(rows)} recorded rows are older than the code that they measure:" if count else "no row is old"
    )
    for (command, date), keys in sorted(old.items(), key=lambda each: each[0][1]):
        print(f"  {date}  {command} --rows {','.join(keys)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
