"""Lets mkdocs serve this folder, whose pages also link files elsewhere in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
COPIED = ("examples/*.py", "examples/*.toml", "examples/*/*", "CONTRIBUTING.md", "results/*")
"""Files of the repository that the site serves as they are."""


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's files that pages link."""
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix().removesuffix(".md")  # not a page
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to the repository's files lead to the copies on the site."""
    return re.sub(r"\]\(\.\./((?:examples|src|results)/[^)]*|CONTRIBUTING\.md)\)", _link, markdown)


def _link(match: re.Match[str]) -> str:
    path = match[1]
    return "](api.md)" if path.startswith("src/") else f"]({path.removesuffix('.md')})"
