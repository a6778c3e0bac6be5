"""A few kills of publishers and readers; `python -m tests.faults --rows publish-kills` has hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.published_kills import lives, lives_of_readers


@pytest.mark.machine
def test_a_few_kills(tmp_path: Path) -> None:
    lives(tmp_path / "versions", 6)


@pytest.mark.machine
def test_a_few_kills_of_readers(tmp_path: Path) -> None:
    lives_of_readers(tmp_path, 3)


@pytest.mark.campaign
def test_many_kills(tmp_path: Path) -> None:
    lives(tmp_path / "versions", 60)
