"""Rates as people write them: `200mbit`, `1gbit`, `none`."""

import re

_UNITS_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

MIN_RATE_BITS_PER_S = 1e6
"""The lowest rate. At 1 Mbit/s a jumbo frame takes 72 ms; at less, TCP's timers would decide the time of a run."""

MAX_RATE_BITS_PER_S = 34e9
"""The highest rate: the kernel's token-bucket filter keeps bytes per second in 32 bits."""


def parse_rate(text: str) -> float | None:
    """Return the bits per second of `text`, or None for `none`, a wire without a limit.

    Raises: ValueError if `text` is not a number with one of the units bit, kbit, mbit, gbit, or is out of range.
    """
    cleaned = text.strip().lower()
    if cleaned == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)", cleaned)
    if match is None:
        raise ValueError(f"rate {text!r} is not a rate; write a number and a unit, as in 200mbit or 1.5gbit, or none")
    return check_rate(float(match[1]) * _UNITS_BITS_PER_S[match[2]])


def check_rate(bits_per_s: float | None) -> float | None:
    """Return the rate unchanged if a link can have it; None means no limit.

    Raises: ValueError if the lab cannot limit a link to this rate.
    """
    if bits_per_s is not None and not MIN_RATE_BITS_PER_S <= bits_per_s <= MAX_RATE_BITS_PER_S:
        raise ValueError(
            f"rate {format_rate(bits_per_s)} is out of range; choose one from {format_rate(MIN_RATE_BITS_PER_S)} to "
            f"{format_rate(MAX_RATE_BITS_PER_S)}, or none for a wire without a limit"
        )
    return bits_per_s


def format_rate(bits_per_s: float | None) -> str:
    """Return the shortest text that `parse_rate` reads back as this rate."""
    if bits_per_s is None:
        return "none"
    for unit in ("gbit", "mbit", "kbit"):
        if abs(bits_per_s) >= _UNITS_BITS_PER_S[unit]:
            return f"{bits_per_s / _UNITS_BITS_PER_S[unit]:.12g}{unit}"
    return f"{bits_per_s:.12g}bit"
