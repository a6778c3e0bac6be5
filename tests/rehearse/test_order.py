"""Streams and threads: no races, no wait that could go, and equal bits in any legal order. See docs/races.md."""

from __future__ import annotations

import pytest

from laconic.rehearse.order import races
from tests.rehearse.campaign import explore
from tests.rehearse.fsdp2 import FSDP2, RACING
from tests.rehearse.programs import PROGRAMS

FEW = ("LoRA, cache host", "overlapped optimizer", "saves", "LocalSteps", "cyclic, Gloo")
_ORDERS = (1,)
"""The seeds of the orders of each program. tests/faults/device.py has thousands."""
_NEEDED = {
    "foreach_all_gather: wait_stream", "foreach_all_gather: record_event", "foreach_all_gather_copy_out: wait",
    "foreach_reduce: wait_stream", "foreach_reduce: record_event", "_post_forward: wait", "post_backward: wait",
    "finalize_backward: wait", "finalize_backward: synchronize", "reshard: record_event",
}  # fmt: skip
"""The function and the call of waits and events without which FSDP2 races, in every torch that laconic supports."""


def test_a_few_programs_have_no_races_and_equal_bits_in_any_order() -> None:
    found = explore({name: PROGRAMS[name] for name in FEW}, _ORDERS)
    assert (found.races, found.different, found.orders) == ({}, [], len(FEW))


@pytest.mark.heavy
def test_no_races_no_unnoticed_waits_and_equal_bits_in_any_order() -> None:
    found = explore(PROGRAMS, _ORDERS)
    assert found.races == {}
    assert found.unnoticed == [], "these may go from the library, or a program is missing that needs them"
    assert found.unvisited == [], "no program passes these calls"
    assert found.different == []
    assert found.orders == len(PROGRAMS) * len(_ORDERS)
    assert len(found.caught) > found.num_calls > 0  # a call with several events has several sites


@pytest.mark.heavy
def test_fsdp2_has_no_races_but_one_and_needs_its_waits() -> None:
    found = explore(FSDP2, _ORDERS)
    assert found.races == {}
    assert found.different == []
    assert found.orders == len(FSDP2) >= 10
    assert {site.split(" ", 1)[1] for site in found.caught} >= _NEEDED
    pairs = [str(race) for program in RACING.values() for race in races(program.record().tape)]
    assert pairs
    assert all("copy_ on stream" in pair and "mul_ on host" in pair for pair in pairs)
