"""A bucket's buffers: the moves between them, what the ledger counts, and the states of the units that have them."""

from __future__ import annotations

import pytest
import torch

from laconic.shard.buffer import AS_THEY_COME, FULL, GATHER, NODE_SUMS, REDUCTION, SHARD, Buffer, Counted, legs_of
from laconic.shard.ledger import Ledger
from laconic.shard.states import GATHER_STATES, PHASES, GatherState, Transitions, UnitPhase


def test_each_leg_of_a_way_is_one_transfer_along_one_axis() -> None:
    assert [(leg.level, leg.transfer) for leg in GATHER] == [("node", "all-gather"), ("local", "all-gather")]
    assert [(leg.level, leg.transfer) for leg in REDUCTION] == [
        ("local", "reduce-scatter"), ("node", "reduce-scatter"), ("island", "all-reduce"),
    ]  # fmt: skip
    assert GATHER[0].source is REDUCTION[-1].target is SHARD
    for way in ((SHARD, FULL), (NODE_SUMS, AS_THEY_COME), (FULL, FULL)):
        with pytest.raises(ValueError, match="no transfer along one axis makes"):
            legs_of(way)


def test_the_ledger_counts_a_buffer_while_it_is_held() -> None:
    ledger, memory = Ledger(), torch.ones(6)
    buffer, on_host = Buffer(memory, ledger), Counted(5, ledger, on_host=True)
    assert (ledger.device_bytes, ledger.device_peak_bytes, ledger.host_bytes) == (24, 24, 5)
    buffer.empty()
    assert (ledger.device_bytes, memory.untyped_storage().nbytes()) == (0, 0)
    buffer.fill()
    assert (ledger.device_bytes, memory.untyped_storage().nbytes()) == (24, 24)
    for counted in (buffer, on_host, buffer, on_host):  # the second time it does nothing
        counted.free()
    assert (ledger.device_bytes, ledger.device_peak_bytes, ledger.host_bytes) == (0, 24, 0)


def test_a_change_of_state_that_is_not_allowed_names_the_unit() -> None:
    phases, gathers = Transitions("layers.3", PHASES), Transitions("layers.3", GATHER_STATES)
    assert phases[UnitPhase.REST, UnitPhase.FORWARD] is UnitPhase.FORWARD
    with pytest.raises(RuntimeError, match=r"layers\.3 is in state REST, from which it cannot go to PAUSE"):
        phases[UnitPhase.REST, UnitPhase.PAUSE]
    with pytest.raises(RuntimeError, match=r"layers\.3 is in state IDLE, from which it cannot go to FULL"):
        gathers[GatherState.IDLE, GatherState.FULL]
