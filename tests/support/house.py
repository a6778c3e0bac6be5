"""The size of the house: lines of Python by room. `git diff --stat` has the change since a revision.

python -m tests.support.house

Lines of code are those without blank lines, comments, docstrings and imports. No room may have more than the ceiling
that ceilings.toml sets. Who raises one says there which ability the lines have bought.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections.abc import Mapping
from io import StringIO
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[2]
HOUSE = ("src/laconic", "tests", "benchmarks")
CEILINGS = "ceilings.toml"
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def room_of(path: PurePath) -> str:
    """The room of a file, given from the root of the repository: its folder, or the top folder."""
    folders = [part for part in path.parts[:-1] if part != "laconic"]
    return "/".join(folders[:2])


def code_lines(text: str) -> int:
    """The lines of a module that hold code: no blank lines, comments, docstrings and imports."""
    without: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (is_docstring and isinstance(node.value.value, str)) or isinstance(node, (ast.Import, ast.ImportFrom)):
            without.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - without)


def sizes(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return the files, the lines and the lines of code of each room."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in sorted(path for top in HOUSE for path in (root / top).rglob("*.py")):
        text, room = path.read_text(encoding="utf-8"), room_of(path.relative_to(root))
        files, lines, code = found.get(room, (0, 0, 0))
        found[room] = files + 1, lines + text.count("\n"), code + code_lines(text)
    return found


def above(code: Mapping[str, int], ceilings: Mapping[str, int]) -> list[str]:
    """Say which rooms have more lines of code than their ceilings, or none, and which ceilings have no room."""
    return [
        *(
            f"{room} has {lines:,} lines of code, and its ceiling in {CEILINGS} is {ceilings[room]:,}: delete some, or "
            "raise the ceiling and say there what the lines have bought"
            for room, lines in code.items()
            if room in ceilings and lines > ceilings[room]
        ),
        *(
            f"{room} has no ceiling in {CEILINGS}: it has {code[room]:,} lines"
            for room in code.keys() - ceilings.keys()
        ),
        *(f"{CEILINGS} has a ceiling for {room}, which is no room" for room in ceilings.keys() - code.keys()),
    ]


def report(by_room: Mapping[str, tuple[int, int, int]]) -> str:
    """Return the table of the library's rooms, and the sums of the library, the tests and the benchmarks."""
    shown = {room: [room] for room in by_room if room.startswith("src/")}
    shown |= {top: [room for room in by_room if room.split("/")[0] == top] for top in ("src", "tests", "benchmarks")}
    lines = [f"{'room':<18}{'files':>6}{'lines':>8}{'of code':>8}"]
    for name, parts in shown.items():
        files, rows, code = (sum(by_room[room][column] for room in parts) for column in range(3))
        lines.append(f"{name:<18}{files:>6}{rows:>8,}{code:>8,}")
    return "\n".join(lines)


def main() -> int:
    """Print the table, and what is above its ceiling. Returns 1 if something is."""
    by_room = sizes(ROOT)
    print(report(by_room))
    ceilings = tomllib.loads((ROOT / CEILINGS).read_text(encoding="utf-8"))["lines"]
    wrong = above({room: code for room, (_, _, code) in by_room.items()}, ceilings)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
