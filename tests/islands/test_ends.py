"""Small samples of the campaigns of tests/faults: kills of islands at any instant, and signals between syncs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import kills_of_islands as kills
from tests.faults import sigterm

pytestmark = pytest.mark.campaign


@pytest.mark.timeout(240)
def test_the_other_island_ends_by_itself_after_a_kill(tmp_path: Path) -> None:
    """One after the other, of one run: in its first steps, then as it starts again."""
    for number, span_s in enumerate((4.0, 2.0)):
        kill = kills.strike(number, "whole", tmp_path / "run", span_s, seed=number)
        assert kill is None or kill.ended_s < kills._LIMIT_S, kill


@pytest.mark.timeout(240)
def test_signals_between_syncs_lose_no_bit(tmp_path: Path) -> None:
    counts = sigterm.campaign(tmp_path / "runs", 1)
    assert counts.tried == 1
    assert (counts.apart, counts.differing) == (0, 0)
