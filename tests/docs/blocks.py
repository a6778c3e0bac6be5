"""The fenced blocks of the documentation, and what a comment before a block says about it.

`<!-- not run: REASON -->` before a block: it cannot run here. `<!-- diff: OLD NEW -->`: it shows how one file of the
repository differs from another. `<!-- part of: FILE -->`: its lines stand in a file that another test runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<about>.*?) -->\n+)?^(?P<fence>```)(?P<language>[a-z]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    """"not run", "diff", "part of" or nothing."""
    about: str
    """The text of the comment after the mark."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """All fenced blocks of README, CONTRIBUTING and docs."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("fence")) + 1
            mark, about = match["mark"] or "", match["about"] or ""
            yield Block(path.relative_to(ROOT).as_posix(), line, match["language"], match["text"], mark, about)
