"""A sample of the tests that pytest has chosen: `--sample 300 --seed 7` draws so many seconds of them.

A campaign's marker says what it takes on one idle core, `campaign(seconds=90)`, if that is much. So what is drawn
depends on the seed alone, not on this machine's speed. A test that would take half of the sample is in none.
"""

from __future__ import annotations

import random

import pytest

_SECONDS = 15
"""What a test takes that says nothing."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("laconic")
    group.addoption("--sample", type=int, metavar="SECONDS", help="draw tests that take so long together")
    group.addoption("--seed", type=int, default=0, help="the seed of the draw")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say how to draw the same tests again."""
    seconds, seed = config.getoption("--sample"), config.getoption("--seed")
    return [] if seconds is None else [f"sample: {seconds} s, drawn with --seed {seed}"]


@pytest.hookimpl(trylast=True)  # after pytest has chosen by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not drawn."""
    seconds = config.getoption("--sample")
    if seconds is None:
        return
    drawn, left = set(), float(seconds)
    for item in random.Random(config.getoption("--seed")).sample(items, len(items)):
        if _seconds(item) <= min(left, seconds / 2):
            drawn.add(item)
            left -= _seconds(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = [item for item in items if item in drawn]


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("campaign")
    return marker.kwargs.get("seconds", _SECONDS) if marker else _SECONDS
