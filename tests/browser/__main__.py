"""The report of `laconic compare` in a real browser, without a network: `make browser`.

It needs no script and sends no request. The page has its tables and pictures, fits a phone's screen, and has readable
text in light and in dark mode. A page with faults shows first that the check would find them.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from laconic.compare.case import STRATEGIES
from laconic.compare.report import render_report
from laconic.compare.result import Prediction, Result
from tests.browser.chromium import BrowserError, Chromium, chromium
from tests.support.canned import canned_run

_SECTIONS = (("full", 200e6), ("full", None), ("lora", 200e6))
_CONTRAST = 4.5  # of WCAG 2, level AA

_TEXT_CONTRASTS = """(() => {
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const channels = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const back = luminance(channels(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll("h1, h2, p, td, th, td small, figcaption, dd, svg text")].map(node => {
    const style = getComputedStyle(node);
    const front = luminance(channels(node.matches("svg text") ? style.fill : style.color));
    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  });
})()"""


def results() -> list[Result]:
    """Every strategy in three sections; some have predictions."""
    made = []
    for section, (job, rate) in enumerate(_SECTIONS):
        for index, strategy in enumerate(STRATEGIES):
            prediction = Prediction(step_s=1.1 * (index + 1), wire_bytes=2e7 * (index + 1)) if section == 0 else None
            made.append(canned_run(strategy, index, job=job, rate_bits_per_s=rate, prediction=prediction))
    return made


def main() -> int:
    """Run the checks; return the exit code."""
    page = render_report(results(), title="2 nodes & <2> ranks", machine="a machine", command="x", legend="a legend")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report, faulty = folder / "report.html", folder / "faulty.html"
        report.write_text(page, encoding="utf-8")
        fault = '<script>throw new Error("x")</script><img src="https://example.com/x.png" alt="">'
        fault += '<div style="width: 2000px">wide</div>'
        faulty.write_text(page.replace("<main>", f"<main>{fault}"), encoding="utf-8")
        try:
            with chromium() as browser:
                faults = [*check_faults_are_found(browser, faulty), *check(browser, report)]
                show(browser, report)
        except BrowserError as error:
            faults = [str(error)]
    for fault in faults:
        print(f"make browser: {fault}", file=sys.stderr)
    if not faults:
        print(
            f"report.html: {len(_SECTIONS)} sections of {len(STRATEGIES)} strategies, at 390 and 1280 pixels, in light "
            "and in dark mode"
        )
    return int(bool(faults))


def check_faults_are_found(browser: Chromium, page: Path) -> list[str]:
    """Open a page with an error, a request and an overflow; return those that the checks below would not find."""
    browser.open(page, width=390)
    found = " ".join(browser.trouble())
    missed = [] if "Content Security Policy" in found else ["a script in the page goes unnoticed"]
    missed += [] if "example.com" in found else ["a request goes unnoticed"]
    return missed + ([] if _overflows(browser) else ["a page that is wider than the screen goes unnoticed"])


def check(browser: Chromium, page: Path) -> list[str]:
    """Open the report on two screens and in two modes; return its faults."""
    faults = []
    num = len(_SECTIONS)
    wanted = {
        "document.title": "2 nodes & <2> ranks",
        "document.scripts.length": 0,
        "document.querySelectorAll('table').length": num,
        "document.querySelectorAll('table caption').length": num,
        "document.querySelectorAll('tbody tr').length": num * len(STRATEGIES),
        "document.querySelectorAll('tbody th[scope=row]').length": num * len(STRATEGIES),
        "document.querySelectorAll('thead th:not([scope=col])').length": 0,
        "document.querySelectorAll('svg').length": 4 * num,
        "document.querySelectorAll('svg > title').length": 4 * num,
        "document.querySelectorAll('svg > desc').length": 4 * num,
        "new Set([...document.querySelectorAll('[id]')].map(n => n.id)).size": 8 * num,
        "document.querySelectorAll('td small').length": 2 * len(STRATEGIES),
        "document.querySelectorAll('svg .mark').length": 2 * len(STRATEGIES),
        "document.querySelectorAll('dl.notes dt').length": len(STRATEGIES),
        "getComputedStyle(document.querySelector('td')).textAlign": "right",
    }
    for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
        where = f"at {width} pixels, {'dark' if dark else 'light'}"
        browser.open(page, width=width, dark=dark)
        for expression, value in wanted.items():
            if (got := browser.evaluate(expression)) != value:
                faults.append(f"{where}: {expression} is {got!r}, not {value!r}")
        faults += [f"{where}: {trouble}" for trouble in browser.trouble()]
        if _overflows(browser):
            faults.append(f"{where}: the page is wider than the screen")
        outside = browser.evaluate(
            "[...document.querySelectorAll('svg text')].filter(n => { const a = n.getBoundingClientRect(), "
            "b = n.closest('svg').getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1; })"
            ".map(n => n.textContent)"
        )
        if outside:
            faults.append(f"{where}: text is cut off: {sorted(set(outside))}")
        if (least := min(browser.evaluate(_TEXT_CONTRASTS))) < _CONTRAST:
            faults.append(f"{where}: the contrast of some text is {least:.2f}, less than {_CONTRAST}")
    return faults


def show(browser: Chromium, page: Path) -> None:
    """With a folder as the argument, leave pictures of the page there."""
    if len(sys.argv) < 2:
        return
    for width, dark in ((390, False), (1280, False), (1280, True)):
        browser.open(page, width=width, dark=dark)
        picture = browser.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        name = f"report-{width}-{'dark' if dark else 'light'}.png"
        (Path(sys.argv[1]) / name).write_bytes(base64.b64decode(picture))


def _overflows(browser: Chromium) -> bool:
    return bool(browser.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


if __name__ == "__main__":
    sys.exit(main())
