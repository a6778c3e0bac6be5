"""The house's rules about names and arguments: see CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import laconic

ROOT = Path(laconic.__file__).parent
VERBS = {"begin", "commit", "decode", "describe", "encode", "load", "main", "parse", "run", "save", "to_toml", "write"}
"""Functions that callers name with their module, such as `commit.begin`: the module says of what."""
SAME = {"cost_of", "ddp", "fsdp2", "fsdp2_hpz", "fsdp2_on_gloo", "hsdp", "on_engine"}
"""Functions that mean the same in each room: of an optimizer, of a strategy."""


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax of all files of laconic."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def places(*kinds: type[ast.stmt]) -> dict[str, list[str]]:
    """The files of all of laconic that define a public name at their top, by name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, kinds) and not node.name.startswith("_"):  # type: ignore[attr-defined]
                found[node.name].append(str(path.relative_to(ROOT)))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("kind", "known"), [(ast.ClassDef, "ShardedModule"), (ast.FunctionDef, "fully_shard")])
def test_what_is_public_has_a_name_of_its_own(kind: type[ast.stmt], known: str) -> None:
    found = places(kind)
    assert found[known], "the walk finds some"
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in VERBS | SAME} == {}


def test_every_public_name_is_defined_in_its_home() -> None:
    """Type checkers, the reference and `laconic.__getattr__` read the homes in the stub `laconic/__init__.pyi`."""
    assert laconic._HOMES, "the stub has some"
    elsewhere = []
    for name, home in laconic._HOMES.items():
        tree = trees()[ROOT.parent / f"{home.replace('.', '/')}.py"]
        made = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}  # an older name
        if name not in made | {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}:
            elsewhere.append(name)
    assert elsewhere == []
