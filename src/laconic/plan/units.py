"""Quantities as people write them, `80 GB`, `10 Gbit/s`, `989 TFLOP/s`, and back."""

import re
from typing import Literal

Unit = Literal["B", "B/s", "bit/s", "FLOP/s", "s", ""]
"""Bytes, bytes per second, bits per second, floating-point operations per second, seconds, or none."""

_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SHORT = {"": 1, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
_UNITS: dict[Unit, tuple[str, str, dict[str, float]]] = {
    "B": ("bytes", "80 GB", {"B": 1}),
    "B/s": ("bytes per second", "25 GB/s", {"B/s": 1, "Bps": 1, "bit/s": 1 / 8, "b/s": 1 / 8, "bps": 1 / 8}),
    "bit/s": ("bits per second", "10 Gbit/s", {"bit/s": 1, "b/s": 1, "bps": 1, "bit": 1, "B/s": 8, "Bps": 8}),
    "FLOP/s": ("FLOP/s", "312 TFLOP/s", {"FLOP/s": 1, "FLOPS": 1, "FLOPs": 1}),
    "s": ("seconds", "20 us", {"s": 1}),
    "": ("", "", {}),
}
"""The words for each unit, an example, the ways to write it, and how many of the unit one of them is."""


def unit_for(key: str) -> Unit:
    """The unit in a name: `wire_bits_per_s` is in bits per second, `device_memory_bytes` in bytes."""
    endings: dict[str, Unit] = {
        "bytes_per_s": "B/s", "bits_per_s": "bit/s", "flops_per_s": "FLOP/s", "bytes": "B", "_s": "s",
    }  # fmt: skip
    return next((unit for ending, unit in endings.items() if key.endswith(ending)), "")


def parse_quantity(text: str, unit: Unit) -> float:
    """Return the number of `unit` that a text like `10 Gbit/s` says.

    Prefixes are those of the SI (k, M, G, T, P) and of IEC (Ki, Mi, Gi, Ti). B is a byte; b and bit are a bit. The
    spelling of `laconic lab`, `200mbit`, is understood too.

    Raises:
        ValueError: the text is no number with such a unit.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(\S*)", text.strip())
    if match is not None:
        prefixes = _SHORT if unit == "s" else _PREFIXES
        for spelling, factor in _UNITS[unit][2].items():
            prefix = match[2].removesuffix(spelling)
            if spelling == "bit":
                prefix = prefix.upper()
            if match[2].endswith(spelling) and prefix in prefixes:
                return float(match[1]) * prefixes[prefix] * factor
    raise ValueError(f"must be {expected(unit)}")


def expected(unit: Unit) -> str:
    """The words for a value of `unit` in a message."""
    words, example, _ = _UNITS[unit]
    return f"a number of {words}, or a text such as '{example}'" if unit else "a number"


def format_number(value: float, digits: int = 3) -> str:
    """Return a number for people, of so many digits: `0.472`, `63.8`, `3,710`."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def format_quantity(value: float, unit: Unit) -> str:
    """Return a short text for people, of four digits: `3.35 TB/s`, `20 us`, `3,633 s`."""
    if unit == "s":
        scale = next((scale for scale in _SHORT if scale != "µ" and value >= _SHORT[scale]), "n")
        return f"{format_number(value / _SHORT[scale], 4)} {scale}s"
    if not unit:
        return format_number(value, 4)
    scale = next((scale for scale in "EPTGMk" if value >= _PREFIXES[scale]), "")
    return f"{format_number(value / _PREFIXES[scale], 4)} {scale}{unit}"
