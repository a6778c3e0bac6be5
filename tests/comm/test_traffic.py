from __future__ import annotations

import dataclasses

import pytest

from laconic.comm.traffic import Snapshot, Traffic


def counted() -> Traffic:
    traffic = Traffic()
    traffic.count("node", "weights", sent_bytes=100, received_bytes=101)
    traffic.count("local", "weights", sent_bytes=10, received_bytes=11)
    traffic.count("island", "gradients", sent_bytes=1000, received_bytes=1001)
    traffic.count("node", "gradients", sent_bytes=7, received_bytes=8)
    traffic.count("node", "weights", sent_bytes=100, received_bytes=101)
    return traffic


def test_totals_by_level_purpose_and_direction() -> None:
    now = counted().snapshot()
    assert now.total("node", "weights", "sent") == 200
    assert now.total("node", "weights") == 402
    assert now.total("node", direction="received") == 210
    assert now.total(purpose="gradients", direction="sent") == 1007
    assert now.total() == 2439
    assert now.total("island", "control") == 0


def test_the_wire_is_the_island_and_the_node_level() -> None:
    now = counted().snapshot()
    assert now.wire() == 200 + 1000 + 7
    assert now.wire("received", "weights") == 202


def test_snapshots_subtract_and_stay_as_they_were() -> None:
    traffic = counted()
    before = traffic.snapshot()
    traffic.count("node", "weights", sent_bytes=5, received_bytes=6)
    traffic.count("node", "control", sent_bytes=4, received_bytes=4)
    delta = traffic.snapshot() - before
    assert delta.total("node", "weights", "sent") == 5
    assert delta.total("node", "control", "received") == 4
    assert delta.total("island") == 0
    assert before.total("node", "weights", "sent") == 200
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.sizes = {}  # type: ignore[misc]


def test_waiting_is_timed_by_level_even_when_it_fails() -> None:
    traffic = Traffic()
    with traffic.waiting("node"):
        pass
    assert set(traffic.snapshot().waits) == {"node"}
    with pytest.raises(RuntimeError, match="lost"), traffic.waiting("local"):
        raise RuntimeError("lost")
    now = traffic.snapshot()
    assert set(now.waits) == {"node", "local"}
    assert now.waited_s() == now.waited_s("node") + now.waited_s("local")
    assert (traffic.snapshot() - now).waited_s() == 0
    assert Snapshot().waited_s() == 0
