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
    exempt = {
        "pyproject.toml",
        "contestants/pyproject.toml",
        str(Path(__file__).relative_to(ROOT)),
    }  # extras of pyproject.toml name other extras
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
    extras = {
        extra
        for folder in (ROOT, ROOT / "contestants")
        for extra in tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    }
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"how_to_install\(['\"](\w+)['\"]", code))
    assert named
    assert named <= extras


def test_the_two_wheels_share_out_the_package() -> None:
    """The wheel of laconic leaves out the room that the wheel of laconic-contestants fills, of the same version."""
    own, theirs = (
        tomllib.loads((ROOT / name).read_text()) for name in ("pyproject.toml", "contestants/pyproject.toml")
    )
    left_out = own["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    filled = theirs["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {f"../{room}": room.removeprefix("src/") for room in left_out} == filled
    assert all((ROOT / room / "__init__.py").exists() for room in left_out)
    version = own["project"]["version"]
    assert theirs["project"]["version"] == version
    assert theirs["project"]["dependencies"] == [f"laconic[train]=={version}"]
