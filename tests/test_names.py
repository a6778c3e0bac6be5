"""The house's rules about names: see CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import laconic


def test_no_two_public_classes_of_a_room_share_a_name() -> None:
    root, places = Path(laconic.__file__).parent, defaultdict(list)
    for path in root.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                file = path.relative_to(root)
                places[file.parts[0], node.name].append(str(file))
    assert places["shard", "ShardedModule"], "the walk finds classes"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_type_checkers_and_the_reference_see_every_public_name() -> None:
    """The imports of `laconic/__init__.py` that only type checkers and the documentation read."""
    tree = ast.parse(Path(laconic.__file__).read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {
        alias.name: node.module
        for block in guarded
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == laconic._HOMES
    assert imported.keys() == set(laconic.__all__)
