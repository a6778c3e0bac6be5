"""Rates as people write them, and the kernel's counters."""

import socket

import pytest

from laconic.lab import InterfaceBytes, format_rate, interface_bytes, parse_rate
from laconic.lab.wire import MTU_BYTES, offloaded_bytes, token_bucket


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("200mbit", 200e6), ("1.5gbit", 1.5e9), ("20000kbit", 20e6), (" 2500000 bit ", 2.5e6), ("1Gbit", 1e9)],
)
def test_reads_a_rate(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["", "200", "200mb", "mbit", "-5mbit", "200 mbit/s", "unlimited"], "200mbit"),
        (["0mbit", "999kbit", "35gbit"], "choose one from 1mbit to 34gbit"),
    ],
)
def test_refuses_other_texts_and_rates_that_the_filter_cannot_keep(texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=message):
            parse_rate(text)


@pytest.mark.parametrize("bits_per_s", [1e6, 123_456_789, 34e9])
def test_reads_a_written_rate_back(bits_per_s: float) -> None:
    assert parse_rate(format_rate(bits_per_s)) == pytest.approx(bits_per_s, rel=1e-9)
    assert parse_rate("none") is None
    assert format_rate(None) == "none"


@pytest.mark.parametrize("bits_per_s", [1e6, 200e6, 34e9])
def test_bucket_holds_an_offloaded_packet_and_fits_the_kernel(bits_per_s: float) -> None:
    bucket = token_bucket(bits_per_s)
    frames = -(-offloaded_bytes(bits_per_s) // MTU_BYTES)
    assert bucket["burst"] >= offloaded_bytes(bits_per_s) + 66 * frames, "packets would be cut in software"
    assert bucket["rate"] * 8 == pytest.approx(bits_per_s)
    assert bucket["limit"] > bucket["burst"]
    assert max(bucket.values()) < 2**32


@pytest.mark.machine
def test_there_are_no_counters_outside_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_LAB_INTERFACE", raising=False)
    assert interface_bytes() is None
    monkeypatch.setenv("LACONIC_LAB_INTERFACE", "")
    assert interface_bytes() is None
    monkeypatch.setenv("LACONIC_LAB_INTERFACE", "nowhere7")
    with pytest.raises(ValueError, match="'nowhere7'"):
        interface_bytes()


@pytest.mark.machine
def test_counts_passing_bytes_and_subtracts() -> None:
    before = interface_bytes("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), ("127.0.0.1", 9))
    after = interface_bytes("lo")
    assert before is not None and after is not None  # noqa: PT018
    moved = after - before
    assert min(moved.sent, moved.received) >= 10_000
    assert InterfaceBytes(sent=5, received=7) - InterfaceBytes(sent=2, received=3) == InterfaceBytes(sent=3, received=4)
