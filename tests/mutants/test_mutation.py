"""A mutant changes one decision, and no mutant changes a word or a type."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.explained import EXPLAINED, MISSED
from tests.mutants.mutation import mutants

pytestmark = pytest.mark.machine

CODE = '''
"""A module."""
LIMIT = 3


def choose(rest: int = 2, *, name: str = "ä") -> int:
    """Text with 1 number."""
    if rest < LIMIT and not name:
        raise ValueError(f"{rest} < {LIMIT + 1}")
    total = max(rest, 1) + len("ä" + name)
    note(total, strict=True)
    return total


class Kept:
    def __repr__(self):
        return str(1 + 1)
'''


def test_each_decision_changes_once_and_text_does_not() -> None:
    found = list(mutants("some/module", CODE))
    assert [(each.before, each.after) for each in found] == [
        ("rest < LIMIT and (not name)", "rest < LIMIT or not name"),
        ("rest < LIMIT", "rest <= LIMIT"),
        ("not name", "name"),
        ("max(rest, 1) + len('ä' + name)", "max(rest, 1) - len('ä' + name)"),
        ("max(rest, 1)", "min(rest, 1)"),
        ("1", "2"),
        ("note(total, strict=True)", "pass"),
        ("return total", "return None"),
    ]
    assert {each.function for each in found} == {"choose"}


def test_each_explained_mutant_is_one_of_today() -> None:
    keys = {*EXPLAINED, *MISSED}
    modules = {key.partition(":")[0] for key in keys}
    codes = {module: (Path("src/laconic") / f"{module}.py").read_text("utf-8") for module in modules}
    assert keys - {each.key for module, code in codes.items() for each in mutants(module, code)} == set()


MODULES = sorted(Path("src/laconic/layout").glob("[!_]*.py"))


@pytest.mark.parametrize(
    "path",
    [MODULES[0], *(pytest.param(path, marks=pytest.mark.campaign) for path in MODULES[1:])],
    ids=lambda path: path.stem,
)
def test_a_mutant_differs_in_one_line_and_has_a_name_of_its_own(path: Path) -> None:
    code = path.read_text("utf-8")
    found, tree = list(mutants(path.stem, code)), ast.dump(ast.parse(code))
    assert len({each.key for each in found}) == len(found) > 0
    for each in found:
        assert ast.dump(ast.parse(each.code)) != tree, each.key
        assert each.code.splitlines()[: each.line - 1] == code.splitlines()[: each.line - 1], each.key
