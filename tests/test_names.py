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
