"""The page of a comparison. A browser opens it in tests/browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from laconic.compare.case import STRATEGIES
from laconic.compare.report import render_report
from laconic.compare.result import Result
from tests.support.canned import canned, canned_host


class Outline(HTMLParser):
    """Collects a page's tags, its attributes and its text by tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def all(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag and text.strip()]


def page_of(*results: Result, title: str = "a title", picture: Path | None = None) -> str:
    return render_report(
        results, title=title, machine="a machine", command="laconic compare x", legend="a legend", picture=picture
    )


def test_the_page_has_a_row_for_each_run_and_a_note_on_each_strategy() -> None:
    outline = Outline(page_of(canned(), canned_host(), canned_host(job="lora")))
    assert len(outline.all("th")) == 14
    cells = outline.all("td")
    assert cells[14:28] == [
        "full training", "200mbit", "laconic host", "35,429", "2.800", "0.35", "100.0", "0.333", "310.0", "50.0",
        "100.0", "2.5000", "0", "1.500",
    ]  # fmt: skip
    assert cells[28] == "LoRA"
    assert outline.all("dt") == ["FSDP2", "laconic host"]


def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path: Path) -> None:
    title, picture = '<b> & "quotes"', tmp_path / "compare.png"
    picture.write_bytes(b"a picture")
    page = page_of(*(canned(strategy=name) for name in STRATEGIES), title=title, picture=picture)
    outline = Outline(page)
    assert {"script", "iframe", "object", "embed", "base"}.isdisjoint(tag for tag, _ in outline.tags)
    assert not re.search(r"https?://|url\(|@import", page)
    loaded = [attributes[name] for _, attributes in outline.tags for name in ("href", "src") if name in attributes]
    assert loaded == ["data:,", "data:image/png;base64,YSBwaWN0dXJl"]
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert len(outline.all("dd")) == len(STRATEGIES)
    assert "<b>" not in page
    assert outline.all("h1") == [title]
