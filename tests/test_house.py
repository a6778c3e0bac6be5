"""The size of the house is counted as it says: tests/support/house.py."""

from __future__ import annotations

from pathlib import PurePath

from tests.support.house import above, code_lines, room_of

MODULE = '''"""A docstring,
of two lines."""

import os
from a import (
    b,
)

# a comment
NUMBERS = [
    1,

    2,  # of three
]
"""Of an attribute."""


def f() -> str:
    """Return a text."""
    return """one

    two"""
'''


def test_lines_of_code_are_those_that_do_something() -> None:
    assert code_lines(MODULE) == 4 + 1 + 3  # a blank line within a text is part of it


def test_rooms_are_folders_and_each_has_a_ceiling() -> None:
    paths = {"src/laconic/shard/unit.py": "src/shard", "src/laconic/errors.py": "src", "tests/x.py": "tests"}
    assert {path: room_of(PurePath(path)) for path in paths} == paths
    assert above({"src/shard": 5, "tests": 2}, {"src/shard": 5, "tests": 2}) == []
    found = above({"src/shard": 6, "src/new": 1}, {"src/shard": 5, "src/old": 3})
    assert [line.split()[0] for line in found] == ["src/shard", "src/new", "ceilings.toml"]
