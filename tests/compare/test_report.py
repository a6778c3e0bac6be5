"""The page of a comparison. A browser opens it in tests/browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from laconic.compare import STRATEGIES, Result
from laconic.compare.report import render_report
from laconic.compare.result import Prediction
from laconic.compare.svg import Bar, Line, TimelineBar, bars, lines, timelines
from tests.support.canned import canned, canned_host, canned_run

VOID = ("meta", "link", "br")


class Outline(HTMLParser):
    """Collects a page's tags, its attributes and its text by tag; fails on tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def all(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def page_of(*results: Result, title: str = "a title") -> str:
    return render_report(results, title=title, machine="a machine", command="laconic compare x", legend="a legend")


def test_a_section_for_each_job_and_rate_has_a_table_and_four_pictures() -> None:
    outline = Outline(
        page_of(canned(), canned_host(), canned(rate_bits_per_s=None), canned(job="lora"), canned_host(job="lora"))
    )
    assert outline.all("h2") == [
        "full training, wire of 200mbit/s", "full training, unshaped wire", "LoRA, wire of 200mbit/s", "The strategies",
    ]  # fmt: skip
    assert (outline.count("table"), outline.count("svg")) == (3, 12)
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) == 24
    named = [attributes["aria-labelledby"] for tag, attributes in outline.tags if tag == "svg"]
    assert {part for each in named for part in (each or "").split()} == set(ids)


def test_rows_have_the_figures_of_the_table_and_ratios_to_fsdp2_of_the_same_section() -> None:
    cells = Outline(page_of(canned(), canned_host())).all("td")
    assert cells[:10] == ["8.000", "1.00", "300.0", "1.000", "310.0", "50.0", "0.0", "–", "2.5000", "0"]
    assert cells[10:] == ["2.800", "0.35", "100.0", "0.333", "310.0", "50.0", "100.0", "1.500", "2.5000", "0"]
    alone = Outline(page_of(canned_host(rate_bits_per_s=None), canned())).all("td")
    assert (alone[1], alone[3], alone[9]) == ("–", "–", "–")


def test_a_prediction_stands_beside_the_measurement_and_in_the_bars() -> None:
    prediction = Prediction(step_s=2.1, wire_bytes=110e6, host_bytes_per_node=100e6)
    outline = Outline(page_of(canned_host(prediction=prediction)))
    assert outline.all("small") == ["predicted 2.1, -25.0%", "predicted 110, +10.0%", "predicted 100, +0.0%"]
    assert sum(attributes.get("class") == "mark" for _, attributes in outline.tags) == 2
    assert Outline(page_of(canned_host())).count("small") == 0
    unmeasured = Outline(page_of(canned(wire_bytes=None, prediction=Prediction(wire_bytes=1e6))))
    assert unmeasured.all("small") == ["predicted 1"]


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    title = '<b> & "quotes"'
    page = page_of(*(canned_run(name, index) for index, name in enumerate(STRATEGIES)), title=title)
    outline = Outline(page)
    assert {"script", "img", "iframe", "object", "embed", "base"}.isdisjoint(tag for tag, _ in outline.tags)
    assert not re.search(r"https?://|url\(|@import|src=", page)
    assert [attributes["href"] for tag, attributes in outline.tags if tag == "link"] == ["data:,"]
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert len(outline.all("dd")) == len(STRATEGIES)
    assert "<b>" not in page
    assert outline.all("h1") == [title]


def widths(picture: str, kind: str) -> list[float]:
    found = re.findall(rf'<rect class="{kind}[^"]*"[^>]* width="([0-9.]+)"', picture)
    return [float(width) for width in found]


def test_bars_and_marks_share_a_scale() -> None:
    rows = [Bar(label="a", colour="s", value=2.0, expected=4.0), Bar(label="b", colour="s", value=1.0)]
    picture = bars(rows, title="t", unit="s")
    first, second = widths(picture, "fill")
    assert first == pytest.approx(2 * second, rel=0.01)
    left = [float(x) for x in re.findall(r'<rect class="(?:fill s|mark)" x="([0-9.]+)"', picture)]
    assert left[1] - left[0] + 1 == pytest.approx(2 * first, rel=0.01)
    assert "not measured" in bars([Bar(label="a", colour="s", value=None)], title="t", unit="s")


def test_a_timeline_is_to_scale_and_names_its_steps() -> None:
    one = TimelineBar(seconds=1.0, wait_s=None, is_timed=False, label="one")
    steps = [one, TimelineBar(seconds=3.0, wait_s=1.5, is_timed=True, label="two")]
    picture = timelines([("a", "s", steps)], title="t")
    first, second = widths(picture, "fill step")
    assert second == pytest.approx(3 * first, rel=0.01)
    assert widths(picture, "wait") == [pytest.approx(1.5 * first, rel=0.01)]
    assert picture.count("untimed") == 1
    assert "<title>one</title>" in picture
    assert "a 2 steps in 4 s" in picture


def test_lines_span_the_chart_and_leave_out_what_is_not_finite() -> None:
    rows = [Line(label="", colour="s", values=of) for of in ([3.0, 1.0, 2.0], [2.0, float("nan"), float("inf")])]
    points = re.findall(r'points="([^"]*)"', lines(rows, title="t", unit="loss"))
    assert points == ["44.0,10.0 217.0,190.0 390.0,100.0", "44.0,100.0"]
    level = re.findall(r'points="([^"]*)"', lines([Line(label="a", colour="s", values=[1.0])], title="t", unit="x"))
    assert level == ["44.0,100.0"]
