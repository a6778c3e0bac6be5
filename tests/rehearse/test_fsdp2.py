"""torch's own FSDP2 and HSDP in the checker: it finds a race, and it needs their waits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from laconic.rehearse.order import races
from tests.rehearse.campaign import explore
from tests.rehearse.fsdp2 import FSDP2, RACING
from tests.support.launch import launch

pytestmark = pytest.mark.machine

_NEEDED = {
    "foreach_all_gather: wait_stream", "foreach_all_gather: record_event", "foreach_all_gather_copy_out: wait",
    "foreach_reduce: wait_stream", "foreach_reduce: record_event", "_post_forward: wait", "post_backward: wait",
    "finalize_backward: wait", "finalize_backward: synchronize", "reshard: record_event",
}  # fmt: skip
"""The function and the call of waits and events without which FSDP2 races, in every torch that laconic supports."""


def _explore() -> dict[str, Any]:
    found = asdict(explore(FSDP2, (1,)))
    found["racing"] = {name: [str(race) for race in races(program.record().tape)] for name, program in RACING.items()}
    return found


def test_fsdp2_has_no_races_but_one_and_needs_its_waits() -> None:
    found = launch(_explore, num_ranks=1, timeout_s=110, backend=None)[0]  # the programs make groups of their own
    assert found["races"] == {}
    assert found["different"] == []
    assert found["orders"] == len(FSDP2) >= 10
    assert {site.split(" ", 1)[1] for site in found["caught"]} >= _NEEDED
    for pairs in found["racing"].values():
        assert pairs
        assert all("copy_ on stream" in pair and "mul_ on host" in pair for pair in pairs)
