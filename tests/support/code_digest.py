"""The digest of code, by which a recorded figure knows the code that it measured."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"


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
