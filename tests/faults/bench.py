"""The state that all campaigns share, and the row that a campaign ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
Found = tuple[int, Iterable[str], str]
"""The number of faults that were tried, the harms, each a text that begins with its kind, and a note."""


def campaign(
    key: str, claim: str, *, harms: Sequence[str], section: str = "", measures: tuple[str, ...] = ()
) -> Callable[[Callable[[Bench], Found]], Callable[[Bench], Found]]:
    """Register the function below as a campaign.

    Args:
        key: of its row.
        claim: the faults that it tries, and the promise.
        harms: the kinds of harm; the promise is 0 of each.
        section: of the record. Default: `trust`.
        measures: see `Row`.
    """

    def register(try_all: Callable[[Bench], Found]) -> Callable[[Bench], Found]:
        @BENCHMARK.row(key, section=section)
        def row(bench: Bench) -> Row:
            tried, found, note = try_all(bench)
            texts = list(found)
            for text in texts:
                print(text, flush=True)
            counts = (f"{sum(text.startswith(harm) for text in texts):,} {harm}" for harm in harms)
            return Row(
                claim=claim,
                measured=f"{tried:,} tried; {', '.join(counts)}",
                note=note,
                measures=measures,
            )

        return try_all

    return register
