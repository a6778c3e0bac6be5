"""The count of lines that `make lint` prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.house import report

pytestmark = pytest.mark.machine


def write(root: Path, name: str, lines: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * lines)


def git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    subprocess.run(["git", "-C", str(root), *author, *arguments], check=True, capture_output=True)


def test_lines_are_counted_by_room_and_against_the_last_tag(tmp_path: Path) -> None:
    write(tmp_path, "src/laconic/shard/unit.py", 7)
    write(tmp_path, "src/laconic/errors.py", 2)
    write(tmp_path, "tests/shard/test_unit.py", 1200)
    write(tmp_path, "benchmarks/wire/traffic.py", 5)
    (tmp_path / "benchmarks/RESULTS.md").write_text("no code\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    assert [line.split()[:3] for line in report(tmp_path).splitlines()[1:]] == [
        ["src/shard", "1", "7"], ["src", "2", "9"], ["tests", "1", "1,200"], ["benchmarks", "1", "5"],
    ]  # fmt: skip
    git(tmp_path, "tag", "--annotate", "v1", "--message", "v1")
    write(tmp_path, "src/laconic/shard/unit.py", 3)
    (tmp_path / "tests/shard/test_unit.py").rename(tmp_path / "tests/shard/test_units.py")
    write(tmp_path, "benchmarks/wire/seconds.py", 1100)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "second")
    write(tmp_path, "src/laconic/errors.py", 3)  # not committed
    head, *rows = report(tmp_path).splitlines()
    assert head.endswith("since v1")
    changes = {row.split()[0]: row.split()[-1] for row in rows}
    assert changes == {"src/shard": "-4", "src": "-3", "tests": "+0", "benchmarks": "+1,100"}
