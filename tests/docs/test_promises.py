"""Every test and every campaign that the page of promises names is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.__main__ import BENCHMARK

ROOT = Path(__file__).parent.parent.parent
CAMPAIGNS = BENCHMARK.rows.keys() - BENCHMARK.sections.keys()
"""The campaigns of faults; `mend` and `parity` have sections of their own."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/promises.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| promise"))
]


def test_each_promise_names_what_proves_it() -> None:
    named: set[str] = set()
    for promise, _, tests, campaigns in ROWS:
        files, rows = re.findall(r"`([^`]+)`", tests), re.findall(r"`([^`]+)`", campaigns)
        assert files or rows, promise
        for file in files:
            assert "def test_" in (ROOT / file).read_text(), f"{promise}: {file}"
        assert set(rows) <= CAMPAIGNS, promise
        named.update(rows)
    assert named == CAMPAIGNS - {"crash-states-elsewhere"}, "a campaign proves no promise"
