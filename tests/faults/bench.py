"""The state that all campaigns share, and the row that a campaign ends with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    measures=tuple(f"laconic.{room}" for room in ("checkpoint", "comm", "guard", "islands", "shard", "store")),
    name="trust",
    module="tests.faults",
    prepare=lambda options: Bench(out=options.out, quick=options.quick),
)
campaign_row = BENCHMARK.row
"""Registers the function below it as a campaign; its section in RESULTS.md is `trust` if none is given."""


def harms_of(found: Iterable[str], kinds: Iterable[str]) -> dict[str, int]:
    """Print all harms that were found, and count them by the kind that each text begins with."""
    texts = list(found)
    for text in texts:
        print(text, flush=True)
    return {kind: sum(text.startswith(kind) for text in texts) for kind in kinds}


def faults_row(
    *, claim: str, tried: int, at_least: int, harms: Mapping[str, int], note: str = "", measures: tuple[str, ...] = ()
) -> Row:
    """Return the row of a campaign.

    Args:
        claim: the faults that the campaign tries, and the promise.
        tried: the number of faults that it tried.
        at_least: the number of faults that the promise asks for.
        harms: the number of faults with each kind of harm, by its name; the promise is 0 of each.
        note: the method, and the reason for a shortfall.
        measures: see `Row`.
    """
    return Row(
        claim=claim,
        required=f">= {at_least:,} tried; {', '.join(f'0 {harm}' for harm in harms)}",
        measured=f"{tried:,} tried; {', '.join(f'{count} {harm}' for harm, count in harms.items())}",
        is_met=tried >= at_least and not any(harms.values()),
        note=note,
        measures=measures,
    )
