"""The pages are complete: every public name and every page has its place."""

from __future__ import annotations

import re

import laconic
import laconic.integrations
import laconic.optim
from tests.docs import strategies
from tests.docs.blocks import ROOT


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    for module in (laconic, laconic.integrations, laconic.optim):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= listed


def test_every_page_is_in_the_navigation() -> None:
    """`mkdocs build --strict`, which checks links and names, is a step of continuous integration of its own."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"[a-z0-9-]+\.md", navigation)) == pages


def test_the_first_screen_defines_the_three_words() -> None:
    screen = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## ")[0]
    assert all(f"| **{word}** |" in screen for word in ("wire", "node", "island"))


def test_the_list_of_strategies_is_the_registrys() -> None:
    page = strategies.PAGE.read_text(encoding="utf-8")
    assert page == strategies.render(page), "run python -m tests.docs.strategies"
