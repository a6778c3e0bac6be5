"""What ragged layouts cost and are worth: padding, planning time, step time and memory, every row of the claim.

    python benchmarks/layout.py                            all rows, recorded in RESULTS.md
    python benchmarks/layout.py --rows padding-1,padding-16    some of them, recorded too
    python benchmarks/layout.py --quick                    few group sizes and a tiny job, printed only

Padding and planning time (benchmarks/_padding.py) are arithmetic and take some minutes for all 1017 group sizes; step
time and memory (benchmarks/_engine.py) are measured in the lab on a quiet machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import _engine
import _padding
from measure import measure, options_of
from record import Record, Row, rows_table

from laconic.compare.table import markdown

_COLUMNS = ("layer", "ranks", "1 row", "16 rows", "32 rows", "128 rows", "FSDP2", "LCM")


@dataclass
class Bench:
    """What rows share."""

    out: Path
    quick: bool = False
    plans: _padding.Plans = field(init=False)

    def __post_init__(self) -> None:
        self.plans = _padding.Plans(quick=self.quick)


ROWS: dict[str, Callable[[Bench], Row]] = {
    "padding-1": lambda bench: _padding.padding_1(bench.plans),
    "padding-16": lambda bench: _padding.padding_16(bench.plans),
    "padding-coarse": lambda bench: _padding.padding_coarse(bench.plans),
    "planning-time": lambda bench: _padding.planning_time(bench.plans),
    "step-time": lambda bench: _engine.step_time(bench.out, quick=bench.quick),
    "reserved": lambda bench: _engine.reserved(bench.out, quick=bench.quick),
}
"""In the order of the table."""


def main() -> int:
    options = options_of(__doc__, ROWS, quick="few sizes and a tiny job", out=Path("runs/layout"))
    bench = Bench(options.out, quick=options.quick)
    rows = measure(ROWS, options, bench, lambda found: _record(found, _padding.table(bench.plans)))
    print(f"\n{rows_table(rows)}\n\n{_render(_padding.table(bench.plans))}")
    return 0


def _render(table: list[list[str]]) -> str:
    return markdown(_COLUMNS, table, num_text_columns=1)


def _record(rows: list[Row], table: list[list[str]]) -> None:
    """Beside rows measured before, and the table if it is a whole one."""
    record = Record(Path(__file__).name, rows, ROWS)
    whole = table if all("-" not in line for line in table) and table else record.known.get("table", [])
    caption = "Padding of a layer at some group sizes; (n): in n buckets."
    record.save(more=[caption, _render(whole)] if whole else [], table=whole)


if __name__ == "__main__":
    sys.exit(main())
