"""docs/published.md, from the record of the predictions and the files of the measurements.

python -m benchmarks.published.page    writes it anew, without predicting
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.published.found import MOST, Found, is_right, median, worst
from benchmarks.published.sources import Measurement, measurements, pairs, sources
from laconic.compare.markdown import markdown
from laconic.plan.units import format_quantity
from tests.support import record

PAGE = record.RESULTS.parent / "docs" / "published.md"
_HEAD = """\
# What strangers measured, predicted

How far can you trust `laconic plan` on GPUs? Here are {num} measurements that other people published, of {clusters}
clusters that we have never seen. Each is a job, a cluster and a figure with its link, in the folder
`benchmarks/published`. The planner predicts each, and this page shows both, the worst first.

{left}- **Nothing is fitted.** Machines have the peaks of their makers' data sheets, times the
  [shares that the planner's tables have](plan.md#name-what-you-have): one for each device and each kind of memory and
  network, whoever measured. These shares are older than this collection.
- The seconds of a step are off by {median:.1%} in the median, and by {worst:+.1%} at worst.
  {far} of {num} are off by more than {most:.0%}, and each has its reason below. {below} predictions are too fast.
- By what a step is predicted to take longest for: {bounds}.
- {memories} rows give memory, too. The prediction is off by {memory_median:.1%} in the median, and by
  {memory_worst:+.1%} at worst.
- Of {pairs} pairs of one model in one source that differ by more than 3 %, the planner puts {right} in the right order
  ({share:.0%}).

`python -m benchmarks.published` predicts them again and writes this page. If you have published a measurement, or find
a mistake in one of these, tell us.

## All measurements
"""


def recorded() -> dict[str, Found]:
    """The predictions on record, by key."""
    return {key: Found(**values) for key, values in record.recorded("published").get("predictions", {}).items()}


def render(found: Mapping[str, Found]) -> str:
    """The page."""
    every = measurements()
    rows = {key: row for key, row in every.items() if key in found}
    missing = len(every) - len(rows)
    ranked = sorted(rows.values(), key=lambda row: -abs(found[row.key].off))
    off = [each.off for each in found.values()]
    memory = [each.memory_off for each in found.values() if each.memory_off is not None]
    orders = [right for one, other in pairs(rows) if (right := is_right(found[one.key], found[other.key])) is not None]
    head = _HEAD.format(
        num=len(rows), clusters=len({row.machines for row in rows.values()}), median=median(off), worst=worst(off),
        far=sum(abs(each) > MOST for each in off), most=MOST, memories=len(memory), memory_median=median(memory),
        memory_worst=worst(memory), below=sum(each < 0 for each in off), bounds=_by_bound(found),
        left=f"{missing} more are collected, and not predicted yet.\n\n" if missing else "", pairs=len(orders),
        right=sum(orders), share=sum(orders) / len(orders),
    )  # fmt: skip
    columns = ("source, measurement", "strategy", "bound by", "published: s", "predicted: s", "off", "memory",
               "predicted", "off")  # fmt: skip
    table = markdown(columns, [_cells(row, found[row.key]) for row in ranked], num_text_columns=3)
    return "\n".join([head, table, "", _reasons(ranked, found), _sources()])


def _cells(row: Measurement, found: Found) -> list[str]:
    memory_off = found.memory_off
    return [
        f"[{row.source}]({row.url}), {row.name}", row.strategy, found.bound_by,
        f"{row.seconds:.3g}", f"{found.seconds:.3g}", f"{found.off:+.1%}",
        *(("", "", "") if memory_off is None or row.memory_bytes is None else (
            format_quantity(row.memory_bytes, "B"), format_quantity(found.memory_bytes, "B"), f"{memory_off:+.1%}")),
    ]  # fmt: skip


def _by_bound(found: Mapping[str, Found]) -> str:
    """The median error of the predictions that compute, the wire and so on bound."""
    off: dict[str, list[float]] = {}
    for each in found.values():
        off.setdefault(each.bound_by, []).append(each.off)
    return ", ".join(f"{bound} {median(these):.1%} ({len(these)} rows)" for bound, these in sorted(off.items()))


def _reasons(ranked: list[Measurement], found: Mapping[str, Found]) -> str:
    """Each reason once, with its measurements."""
    told: dict[str, list[str]] = {}
    for row in ranked:
        if row.reason and abs(found[row.key].off) > MOST:
            told.setdefault(row.reason, []).append(f"{row.source}, {row.name} ({found[row.key].off:+.0%})")
    lines = [f"- {reason} *{'; '.join(names)}.*" for reason, names in told.items()]
    hedge = "The pattern of the errors suggests these reasons; no experiment has isolated one of them.\n"
    return "\n".join([f"## Why some are off by more than {MOST:.0%}\n", hedge, *lines, ""])


def _sources() -> str:
    lines = [
        f"- **{source.name}**: [{source.title}]({source.url}), {source.date}. Left open, and assumed: {source.assumed}"
        for source in sources().values()
    ]
    return "\n".join(["## The sources, and what they leave open\n", *lines, ""])


def write(found: Mapping[str, Found]) -> None:
    """Write the page."""
    PAGE.write_text(render(found), encoding="utf-8")


if __name__ == "__main__":
    write(recorded())
