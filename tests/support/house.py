"""The size of the house: lines of Python by room, and the change since the last tag or since this branch left main.

python -m tests.support.house
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[2]
HOUSE = ("src/laconic", "tests", "benchmarks")


def room_of(path: PurePath) -> str:
    """The room of a file, given from the root of the repository: of the library its folder, else the top folder."""
    return f"{path.parts[0]}/{path.parts[2]}" if path.parts[0] == "src" and len(path.parts) > 3 else path.parts[0]


def sizes(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return the files, lines and characters of each room."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in sorted(path for top in HOUSE for path in (root / top).rglob("*.py")):
        text, room = path.read_text(encoding="utf-8"), room_of(path.relative_to(root))
        files, lines, characters = found.get(room, (0, 0, 0))
        found[room] = files + 1, lines + text.count("\n"), characters + len(text)
    return found


def base_of(root: Path) -> str:
    """Return the revision to compare with; "" where git knows none, as in an archive or in a shallow clone."""
    return _git(root, "describe", "--tags", "--abbrev=0") or _git(root, "merge-base", "HEAD", "origin/main")


def changes(root: Path, base: str) -> Counter[str]:
    """Return how many lines each room has more than at `base`, with what is not committed yet."""
    found: Counter[str] = Counter()
    for line in _git(root, "diff", "--numstat", "--no-renames", base, "--", *HOUSE).splitlines():
        added, removed, name = line.split("\t")
        if name.endswith(".py"):
            found[room_of(PurePath(name))] += int(added) - int(removed)
    return found


def _git(root: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def report(root: Path) -> str:
    """Return the table of the library's rooms, and the sums of the library, the tests and the benchmarks."""
    by_room, base = sizes(root), base_of(root)
    changed = changes(root, base) if base else Counter()
    rooms = sorted({*by_room, *changed})
    shown = {room: [room] for room in rooms if "/" in room}
    shown |= {top: [room for room in rooms if room.split("/")[0] == top] for top in ("src", "tests", "benchmarks")}
    lines = [f"{'room':<18}{'files':>6}{'lines':>8}{'a line':>8}" + (f"  since {base[:12]}" if base else "")]
    for name, parts in shown.items():
        files, rows, characters = (sum(by_room.get(room, (0, 0, 0))[column] for room in parts) for column in range(3))
        change = f"{sum(changed[room] for room in parts):>+9,}" if base else ""
        lines.append(f"{name:<18}{files:>6}{rows:>8,}{characters / max(rows, 1):>8.1f}{change}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(ROOT))
