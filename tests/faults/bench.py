"""The state that all campaigns share, and the row that a campaign ends with."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.support.measure import Options
from tests.support.record import Row


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The options of the command."""

    out: Path
    """The folder for the files of the campaigns; it exists."""
    quick: bool
    """Whether to try a small fixed sample only."""


def open_bench(options: Options) -> AbstractContextManager[Bench]:
    """Make the folder for the files of the campaigns."""
    options.out.mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(Bench(out=options.out.absolute(), quick=options.quick))


def faults_row(*, key: str, claim: str, tried: int, at_least: int, harms: dict[str, int], note: str = "") -> Row:
    """Return the row of a campaign.

    Args:
        key: the name for `--rows`.
        claim: the faults that the campaign tries, and the promise.
        tried: the number of faults that it tried.
        at_least: the number of faults that the promise asks for.
        harms: the number of faults with each kind of harm, by its name; the promise is 0 of each.
        note: the method, and the reason for a shortfall.
    """
    found = ", ".join(f"{count} {harm}" for harm, count in harms.items())
    return Row(
        key=key,
        claim=claim,
        required=f">= {at_least:,} tried; {', '.join(f'0 {harm}' for harm in harms)}",
        measured=f"{tried:,} tried; {found}",
        is_met=tried >= at_least and not any(harms.values()),
        note=note,
    )
