"""What laconic promises and refuses on its pages has a test in `make test`: the lists are the pages themselves."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.methods import BEGIN
from tests.docs.rows import ROWS
from tests.support.tiers import OUTSIDE

ROOT = Path(__file__).parents[1]
ELSEWHERE = {*OUTSIDE, "heavy"}
"""The markers of tests that `make test` leaves out."""
NOT_INSIDE = {
    "A link that is cut delays a run or ends it, and changes nothing": "the link is the kernel's",
    "Both cost next to nothing": "a measurement, of which `make test` has none",
}
"""The promises without a test in `make test`, and why."""
UNTOLD = {
    "is stuck because": "a thread of a rank that computes ends its process",
}
"""The messages without a test in `make test`, and why."""


def _names(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


@functools.cache
def inside(path: Path) -> list[ast.stmt]:
    """A file's statements without the tests of other tiers; [] if no test is left for `make test`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [each for each in tree.body if isinstance(each, ast.Assign) and "pytestmark" in ast.unparse(each)]
    if any(_names(each) & ELSEWHERE for each in marks):
        return []
    kept = [each for each in tree.body if not _is_elsewhere(each)]
    has_test = any(isinstance(each, ast.FunctionDef) and each.name.startswith("test_") for each in kept)
    return kept if has_test else []


def _is_elsewhere(statement: ast.stmt) -> bool:
    decorators = getattr(statement, "decorator_list", [])
    return any(isinstance(each, ast.Attribute) and each.attr in ELSEWHERE for each in decorators)


def test_each_promise_has_a_test_in_make_test() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    rows = [(cells[0].strip(), re.findall(r"`(tests/[^`]+\.py)`", cells[2])) for cells in lines if len(cells) == 4]
    promises = [(promise, files) for promise, files in rows if promise.strip("-") and promise != "promise"]
    assert len(promises) > 20
    bare = {promise for promise, files in promises if not any(inside(ROOT / file) for file in files)}
    assert bare == NOT_INSIDE.keys()


@pytest.mark.parametrize("page", ROWS)
def test_each_row_for_those_who_come_from_elsewhere_has_a_test_in_make_test(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(BEGIN)[0]  # what is generated is run
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = {line.strip("| ").split(" | ")[0] for line in lines} - {"DDP", "FSDP2", "call"}
    assert rows == ROWS[page].keys()
    for file, _, name in (each.partition("::") for each in ROWS[page].values()):
        names = {each.name for each in inside(ROOT / "tests" / f"{file}.py") if isinstance(each, ast.FunctionDef)}
        assert sum(each.startswith(name) for each in names) == 1, f"{file}::{name}"


def _of_the_room(statement: ast.AST, path: Path) -> list[Path]:
    """The modules of a test's own room that a statement imports."""
    if not isinstance(statement, ast.ImportFrom) or not (statement.module or "").startswith(
        f"tests.{path.parent.name}"
    ):
        return []
    names = [statement.module, *(f"{statement.module}.{each.name}" for each in statement.names)]
    return [file for name in names if (file := ROOT / f"{str(name).replace('.', '/')}.py").exists()]


def _texts() -> Iterator[str]:
    """The strings in tests of `make test`, and in the modules of their rooms that they import."""
    for path in sorted({*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__)}):
        own = [
            ast.parse(file.read_text(encoding="utf-8")) for each in inside(path) for file in _of_the_room(each, path)
        ]
        for statement in [*inside(path), *own]:
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield _plain(re.sub(r"\\(.)", r"\1", node.value))


def _plain(text: str) -> str:
    return " ".join(text.split())


_FEW = 15
"""The characters in one go that a test must have of a message."""


def _is_told(message: str, texts: str) -> bool:
    parts = [_plain(part) for part in message.split("...")]
    return any(
        part[start : start + _FEW] in texts for part in parts if part for start in range(max(1, len(part) - _FEW + 1))
    )


def test_each_message_on_the_page_of_errors_is_asked_for_in_make_test() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 50
    texts = "\n".join(_texts())
    assert {message for message in messages if not _is_told(message, texts)} == UNTOLD.keys()
