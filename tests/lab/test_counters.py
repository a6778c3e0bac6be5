"""Reading the kernel's counters."""

import socket

import pytest

from laconic.lab import InterfaceBytes, interface_bytes

pytestmark = pytest.mark.machine


def test_there_are_no_counters_outside_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_LAB_INTERFACE", raising=False)
    assert interface_bytes() is None
    monkeypatch.setenv("LACONIC_LAB_INTERFACE", "")
    assert interface_bytes() is None


def test_unknown_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_LAB_INTERFACE", "nowhere7")
    with pytest.raises(ValueError, match="'nowhere7'"):
        interface_bytes()


def test_counts_passing_bytes_and_subtracts() -> None:
    before = interface_bytes("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), ("127.0.0.1", 9))
    after = interface_bytes("lo")
    assert before is not None
    assert after is not None
    moved = after - before
    assert moved.sent >= 10_000
    assert moved.received >= 10_000
    assert InterfaceBytes(sent=5, received=7) - InterfaceBytes(sent=2, received=3) == InterfaceBytes(sent=3, received=4)
