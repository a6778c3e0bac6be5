"""Streams and threads: no races, no wait that could go, and equal bits in any legal order. See docs/races.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from tests.rehearse.campaign import explore
from tests.rehearse.programs import PROGRAMS
from tests.support.launch import launch

pytestmark = pytest.mark.machine

_ORDERS = (1,)
"""The seeds of the orders of each program. tests/faults/races.py has thousands."""


def _explore() -> dict[str, Any]:
    return asdict(explore(PROGRAMS, _ORDERS))


@pytest.mark.timeout(240)  # of some ninety programs
def test_no_races_no_unnoticed_waits_and_equal_bits_in_any_order() -> None:
    found = launch(_explore, num_ranks=1, timeout_s=220, backend=None)[0]  # the programs make groups of their own
    assert found["races"] == {}
    assert found["unnoticed"] == [], "these may go from the library, or a program is missing that needs them"
    assert found["unvisited"] == [], "no program passes these calls"
    assert found["different"] == []
    assert found["orders"] == len(PROGRAMS) * len(_ORDERS)
    assert len(found["caught"]) > found["num_calls"] > 0  # a call with several events has several sites
