"""The README and the pages show a newcomer the first screen, and a picture of each process."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES, SCREEN_LINES = 120, 40
PROCESSES = {
    "choose": "choose", "placement": "layouts", "wire": "thinner", "local steps": "local-steps", "cyclic": "cyclic",
    "checks": "checks", "a step": "index",
}  # fmt: skip
"""The page of the site that describes each process."""


def readme_lacks() -> list[str]:
    """What the README's first screen lacks."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    screen = "\n".join(lines[:SCREEN_LINES])
    wanted = {word: word in screen for word in ("FSDP2", "install", "GPU")}
    wanted["code"] = re.search(r"^```python\n.+?^```$", screen, re.MULTILINE | re.DOTALL) is not None
    return [name for name, is_there in wanted.items() if not is_there]


def readme_lines() -> int:
    """The number of the README's lines."""
    return len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())


def pictures(page: str) -> list[str]:
    """The diagrams and picture files on a page of the site; a file that is not there does not count."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    diagrams = re.findall(r"^```(text)$", text, re.MULTILINE)
    files = re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE)
    return diagrams + [name for name in files if (ROOT / "docs" / name).is_file()]
