"""Every test and every campaign that the page of promises names is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.__main__ import CAMPAIGNS

ROOT = Path(__file__).parent.parent.parent
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
        assert set(rows) <= CAMPAIGNS.keys(), promise
        named.update(rows)
    assert named == CAMPAIGNS.keys() - {"crash-states-elsewhere"}, "a campaign proves no promise"
