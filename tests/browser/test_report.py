"""A real browser opens the report of `laconic compare` without a network, as wide as a phone and as a large screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from laconic.compare.case import STRATEGIES
from laconic.compare.report import render_report
from laconic.compare.result import Prediction
from tests.browser.chromium import BrowserError, Chromium, chromium
from tests.support.canned import canned_run

_CUT_OFF = """[...document.querySelectorAll('svg text')].filter(n => {
  const a = n.getBoundingClientRect(), b = n.closest('svg').getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1;
}).map(n => n.textContent)"""
_LEAST_CONTRAST = """(() => {
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const channels = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const back = luminance(channels(getComputedStyle(document.body).backgroundColor));
  return Math.min(...[...document.querySelectorAll("h1, h2, p, td, th, td small, figcaption, dd, svg text")].map(n => {
    const style = getComputedStyle(n);
    const front = luminance(channels(n.matches("svg text") ? style.fill : style.color));
    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  }));
})()"""


@pytest.fixture
def browser() -> Iterator[Chromium]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(chromium())
        except BrowserError as error:
            pytest.fail(str(error), pytrace=False)
        yield found


@pytest.mark.machine
def test_the_report_fits_a_phone_and_a_wide_screen_and_can_be_read_in_both_modes(
    browser: Chromium, tmp_path: Path
) -> None:
    prediction = Prediction(step_s=1.1, wire_bytes=2e7)
    results = [canned_run(name, index, prediction=prediction) for index, name in enumerate(STRATEGIES)]
    page = tmp_path / "report.html"
    page.write_text(render_report(results, title="2 nodes & <2> ranks", machine="m", command="x", legend="l"), "utf-8")
    backgrounds = []
    for width, dark in ((390, False), (1280, False), (390, True)):
        browser.open(page, width=width, dark=dark)
        assert browser.evaluate("document.title") == "2 nodes & <2> ranks"
        assert browser.trouble() == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(_CUT_OFF) == []
        assert browser.evaluate(_LEAST_CONTRAST) >= 4.5, "the contrast of WCAG 2, level AA"
        backgrounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] == backgrounds[1] != backgrounds[2], "dark and light"
