"""Rates as people write them."""

import pytest

from laconic.lab import format_rate, parse_rate
from laconic.lab.wire import MTU_BYTES, node_address, offloaded_bytes, token_bucket

pytestmark = pytest.mark.machine


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("200mbit", 200e6),
        ("1gbit", 1e9),
        ("1.5gbit", 1.5e9),
        ("20000kbit", 20e6),
        (" 2500000 bit ", 2.5e6),
        ("1Gbit", 1e9),
    ],
)
def test_reads_a_rate(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


def test_none_is_no_limit() -> None:
    assert parse_rate("none") is None
    assert format_rate(None) == "none"


@pytest.mark.parametrize("text", ["", "200", "200mb", "mbit", "-5mbit", "200 mbit/s", "unlimited"])
def test_refuses_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="200mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0mbit", "999kbit", "35gbit"])
def test_refuses_rates_that_the_filter_cannot_keep(text: str) -> None:
    with pytest.raises(ValueError, match="choose one from 1mbit to 34gbit"):
        parse_rate(text)


@pytest.mark.parametrize("bits_per_s", [1e6, 20e6, 123_456_789, 2.5e9, 34e9])
def test_reads_a_written_rate_back(bits_per_s: float) -> None:
    assert parse_rate(format_rate(bits_per_s)) == pytest.approx(bits_per_s, rel=1e-9)


@pytest.mark.parametrize("bits_per_s", [1e6, 20e6, 200e6, 2e9, 34e9])
def test_bucket_holds_an_offloaded_packet_and_fits_the_kernel(bits_per_s: float) -> None:
    bucket = token_bucket(bits_per_s)
    frames = -(-offloaded_bytes(bits_per_s) // MTU_BYTES)
    assert bucket["burst"] >= offloaded_bytes(bits_per_s) + 66 * frames, "packets would be cut in software"
    assert bucket["rate"] * 8 == pytest.approx(bits_per_s)
    assert bucket["limit"] > bucket["burst"]
    assert max(bucket.values()) < 2**32


def test_nodes_have_addresses_of_their_own() -> None:
    assert len({node_address(node) for node in range(1000)}) == 1000
    assert node_address(0) == "10.77.0.1"
