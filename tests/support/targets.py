"""Bounds that keep recorded figures from getting worse: benchmarks/targets.toml, which a test holds to the record.

A target has a bound for each number of the row's `measured`, in their order, with `any` for one that has none:
"0.462x / 0.898x" keeps "<= 0.47 / <= 0.91", and "3 of 4 cells, 0.99x" keeps "any / any / <= 1".
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "targets.toml"
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:/\d[\d,]*(?:\.\d+)?)?(?!\w*bit)")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "=": operator.eq, "+-": lambda number, limit: abs(number) <= limit
}  # fmt: skip


@cache
def all_targets() -> dict[str, dict[str, str]]:
    """The targets by section and key."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def of(section: str, key: str) -> str | None:
    """The target of a row, if it has one."""
    return all_targets().get(section, {}).get(key)


def missed(target: str, measured: str) -> list[str]:
    """Say which numbers are outside their bounds, or that a number has none.

    Raises:
        ValueError: a bound is none.
    """
    numbers, bounds = numbers_of(measured), [bound.strip() for bound in target.split(" / ")]
    if len(numbers) != len(bounds):
        return [f"{len(bounds)} bounds for {len(numbers)} numbers"]
    pairs = zip(numbers, bounds, strict=True)
    return [f"{number:g} is not {bound}" for number, bound in pairs if bound != "any" and not _keeps(number, bound)]


def _keeps(number: float, bound: str) -> bool:
    sign, _, limit = bound.partition(" ")
    if sign not in _COMPARISONS:
        raise ValueError(f"a bound is `any`, or begins with {', '.join(_COMPARISONS)}; not {bound!r}")
    return _COMPARISONS[sign](number, _value(limit))


def numbers_of(text: str) -> list[float]:
    """The numbers of a text; 1/15.5 is one."""
    return [_value(found) for found in _NUMBER.findall(text)]


def _value(text: str) -> float:
    above, _, below = text.replace(",", "").partition("/")
    return float(above) / float(below or 1)
