"""No text promises that a package index has laconic."""

import re
import subprocess
import tomllib
from pathlib import Path

from laconic.extras import how_to_install

ROOT = Path(__file__).parents[2]
_PROMISE = re.compile(
    r"pip3? install[^\n]*?[\s'\"`](?<!clone of )laconic(?!\w)(?!\[[\w{},]+\] @ )|[`'\"]laconic\[\w[\w,]*\](?! @ )"
)


def test_no_text_promises_an_index() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py", "*.toml", "Makefile"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
    ).stdout.split()  # fmt: skip
    exempt = {"pyproject.toml", str(Path(__file__).relative_to(ROOT))}  # extras of pyproject.toml name other extras
    promises = [
        f"{name}: {match[0]}"
        for name in listed
        if name not in exempt
        for match in _PROMISE.finditer((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert listed
    assert promises == []


def test_the_search_finds_promises() -> None:
    for text in ("pip install laconic", "pip install 'laconic[trl]'", "`laconic[trl]`", 'pip install -U "laconic"'):
        assert _PROMISE.search(text), text
    for text in ("pip install '.[trl]' in a clone of laconic", how_to_install("trl"), "pip install -e ."):
        assert not _PROMISE.search(text), text


def test_extras_in_texts_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"how_to_install\(['\"](\w+)['\"]", code))
    assert named
    assert named <= set(extras)
