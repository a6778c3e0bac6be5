"""A real browser opens the report of `laconic compare` without a network, as wide as a phone and as a large screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from laconic.compare.case import STRATEGIES
from laconic.compare.plot import save_plot
from laconic.compare.report import render_report
from tests.support.canned import canned

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=10000", "--dump-dom",
)  # fmt: skip
_AROUND = """<!DOCTYPE html><meta name="color-scheme" content="light dark">
<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe><pre></pre>
<script>onload = () => {{
  const page = document.querySelector("iframe").contentDocument, style = getComputedStyle(page.body);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const of = colour => luminance(colour.match(/[\\d.]+/g).slice(0, 3).map(Number));
  const back = of(style.backgroundColor);
  const contrasts = [...page.querySelectorAll("h1, h2, p, td, th, dt, dd")].map(n => of(getComputedStyle(n).color))
    .map(front => (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05));
  document.querySelector("pre").textContent = JSON.stringify({{
    title: page.title, width: page.documentElement.scrollWidth, contrast: Math.min(...contrasts), back: back,
    picture: page.querySelector("img").naturalWidth,
  }});
}}</script>"""
"""A page with the report in a frame as wide as a screen, which writes down how the report looks."""


def look(page: str, folder: Path, *, width: int, dark: bool = False) -> dict[str, Any]:
    """What the browser says of a page on a screen `width` pixels wide, in light or dark mode."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    assert path is not None, f"no browser here; looked for {', '.join(_NAMES)}. On Debian: apt-get install chromium"
    around = folder / "around.html"
    around.write_text(_AROUND.format(width=width, page=escape(page)), "utf-8")
    mode = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [path, *_OPTIONS, mode, f"--user-data-dir={folder / 'profile'}", around.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(unescape(re.findall("<pre>(.*)</pre>", done.stdout)[-1]))
    return found


@pytest.mark.machine
def test_the_report_fits_a_phone_and_a_wide_screen_and_can_be_read_in_both_modes(tmp_path: Path) -> None:
    results, picture = [canned(strategy=name) for name in STRATEGIES], tmp_path / "compare.png"
    save_plot(results, picture, title="a title")
    title = "2 nodes & <2> ranks"
    page = render_report(results, title=title, machine="m", command="x", legend="l", picture=picture)
    backgrounds = []
    for width, dark in ((390, False), (1280, False), (390, True)):
        found = look(page, tmp_path, width=width, dark=dark)
        assert found["title"] == title
        assert found["width"] <= width
        assert found["contrast"] >= 4.5, "the contrast of WCAG 2, level AA"
        assert found["picture"] > 0
        backgrounds.append(found["back"])
    assert backgrounds[0] == backgrounds[1] > backgrounds[2], "dark and light"
