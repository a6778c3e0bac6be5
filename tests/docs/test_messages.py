"""The messages on the page of errors are those of the sources."""

from __future__ import annotations

import ast
import re

from tests.docs.blocks import ROOT


def texts() -> list[str]:
    """Every string of the sources; `...` stands for a value that is put in."""
    found = []
    for path in (ROOT / "src" / "laconic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_on_the_page_of_errors_exists() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 50
    sources = texts()
    unknown = [text for text in messages if not any(_is_in(text, source) for source in sources)]
    assert not unknown


def _is_in(message: str, source: str) -> bool:
    """Whether the parts of a message between `...` stand in the source, in this order."""
    return re.search(r".*".join(map(re.escape, message.split("..."))), source, re.DOTALL) is not None
