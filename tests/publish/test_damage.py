"""Some damage to versions; `python -m tests.faults --rows publish-damage` tries more of it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.published_damage import damaged_folders


def test_damage_is_told_or_does_no_harm(tmp_path: Path) -> None:
    found = damaged_folders(tmp_path, 60)
    assert found.keys() <= {"told", "harmless"}, found
    assert found["told"] > 15
