"""The state that all campaigns share, and the row that a campaign ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.measure import Benchmark
from tests.support.record import Row


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The options of the command."""

    out: Path
    """The folder for the files of the campaigns; it exists."""
    quick: bool
    """Whether to try a small fixed sample only."""


BENCHMARK: Benchmark[Bench] = Benchmark(
    measures=(
        "laconic.checkpoint",
        "laconic.comm",
        "laconic.guard",
        "laconic.islands",
        "laconic.shard",
        "laconic.store",
    ),
    name="trust",
    module="tests.faults",
    prepare=lambda options: Bench(out=options.out, quick=options.quick),
)
campaign_row = BENCHMARK.row
"""Registers the function below it as a campaign; its section in RESULTS.md is `trust` if none is given."""


def faults_row(*, claim: str, tried: int, at_least: int, harms: dict[str, int], note: str = "") -> Row:
    """Return the row of a campaign.

    Args:
        claim: the faults that the campaign tries, and the promise.
        tried: the number of faults that it tried.
        at_least: the number of faults that the promise asks for.
        harms: the number of faults with each kind of harm, by its name; the promise is 0 of each.
        note: the method, and the reason for a shortfall.
    """
    found = ", ".join(f"{count} {harm}" for harm, count in harms.items())
    return Row(
        claim=claim,
        required=f">= {at_least:,} tried; {', '.join(f'0 {harm}' for harm in harms)}",
        measured=f"{tried:,} tried; {found}",
        is_met=tried >= at_least and not any(harms.values()),
        note=note,
    )
