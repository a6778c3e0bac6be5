"""How much ragged layouts pad, and how much time and memory they save: every row of the claim.

    python -m benchmarks.layout                              all rows, recorded in RESULTS.md
    python -m benchmarks.layout --rows padding-1,padding-16  some rows, recorded too
    python -m benchmarks.layout --quick                      few group sizes and a tiny job, printed only

Padding and planning time (padding.py) are arithmetic and take some minutes for all 1017 group sizes. Step time and
memory (engine.py) are measured in the lab on a quiet machine.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from benchmarks.layout import engine, padding
from laconic.compare.table import markdown
from tests.support.measure import Benchmark, Options
from tests.support.record import Record

_COLUMNS = ("layer", "ranks", "1 row", "16 rows", "32 rows", "128 rows", "FSDP2", "LCM")


class Bench:
    """The plans that the rows share."""

    def __init__(self, out: Path, *, quick: bool) -> None:
        self.out, self.quick = out, quick
        self.plans = padding.Plans(quick=quick)


def _prepare(options: Options) -> contextlib.nullcontext[Bench]:
    return contextlib.nullcontext(Bench(options.out, quick=options.quick))


def save(record: Record, table: list[list[str]]) -> None:
    """Write the rows, and the table of some group sizes; a table with gaps does not replace the recorded one."""
    is_whole = bool(table) and all("-" not in line for line in table)
    table = table if is_whole else record.known.get("table", [])
    caption = "Padding of a layer at some group sizes; (n): in n buckets."
    record.save(more=[caption, _render(table)] if table else [], table=table)


def _render(table: list[list[str]]) -> str:
    return markdown(_COLUMNS, table, num_text_columns=1)


BENCHMARK = Benchmark(
    name="layout", doc=__doc__, prepare=_prepare,
    rows={
        "padding-1": lambda bench: padding.padding_1(bench.plans),
        "padding-16": lambda bench: padding.padding_16(bench.plans),
        "padding-coarse": lambda bench: padding.padding_coarse(bench.plans),
        "planning-time": lambda bench: padding.planning_time(bench.plans),
        "step-time": lambda bench: engine.step_time(bench.out, quick=bench.quick),
        "reserved": lambda bench: engine.reserved(bench.out, quick=bench.quick),
    },
    save=lambda record, bench: save(record, padding.table(bench.plans)),
    details=lambda bench: _render(padding.table(bench.plans)),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
