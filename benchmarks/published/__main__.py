"""The planner's predictions beside what strangers published: seconds, memory, and the order inside a source.

    python -m benchmarks.published                         all rows, recorded; docs/published.md is written anew
    python -m benchmarks.published --sources oumi,fcdp     predicts these files again, and keeps the other predictions
    python -m benchmarks.published --quick                 one measurement of each file, printed only

Nothing is fitted: see [Note: A published file]. A prediction takes some seconds, all together a quarter of an hour.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from benchmarks.published import page, sources
from benchmarks.published.found import MOST, Found, is_right, median, worst
from benchmarks.published.sources import Measurement
from laconic.plan.candidates import CANDIDATES
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor
from tests.support.measure import Benchmark, Options
from tests.support.record import Record, Row


class Bench:
    """The predictions: those of this run, and of earlier runs of rows that still stand in a file."""

    def __init__(self, options: Options) -> None:
        self.rows = sources.measurements()
        self.known = {} if options.quick else page.recorded()
        wanted = options.sources.split(",") if options.sources else list(sources.sources())
        self._wanted = [row for row in self.rows.values() if row.source in wanted]
        if options.quick:
            self._wanted = list({row.source: row for row in self._wanted}.values())
        self._found: dict[str, Found] = {}
        self._predictors: list[Predictor] = []

    @property
    def found(self) -> dict[str, Found]:
        """The prediction of each measurement, by its key."""
        if not self._found:
            for row in self._wanted:
                self.known[row.key] = _predicted(self._predictor(row), row)
                print(f"{row.key}: {self.known[row.key]}", file=sys.stderr, flush=True)
            self._found = {key: self.known[key] for key in self.rows if key in self.known}
        return self._found

    def _predictor(self, row: Measurement) -> Predictor:
        """One for a row. An earlier one's traces serve, if the job is the same."""
        alike = next((each for each in self._predictors if each.config == row.config), None)
        if alike is not None:
            return alike.on(row.cluster)
        self._predictors.append(Predictor(row.config, row.cluster, device_type="cuda"))
        return self._predictors[-1]


def _predicted(predictor: Predictor, row: Measurement) -> Found:
    estimate = predictor.estimate(CANDIDATES[row.strategy])
    if not isinstance(estimate, Estimate):
        raise ValueError(f"{row.key}: {estimate.reason}")
    return Found.of(row, estimate)


def _save(record: Record, bench: Bench) -> None:
    record.save(predictions={key: asdict(each) for key, each in bench.found.items()})
    page.write(bench.found)


def _add_options(parser: Any) -> None:
    parser.add_argument("--sources", default="", metavar="A,B,...", help="the files to predict; default: all")


BENCHMARK = Benchmark(
    measures=("laconic.plan", "laconic.rehearse", "laconic.shard"), name="published", prepare=Bench, save=_save,
    add_options=_add_options,
)  # fmt: skip


@BENCHMARK.row("breadth")
def breadth(bench: Bench) -> Row:
    rows = [bench.rows[key] for key in bench.found]
    clusters = {row.machines for row in rows}
    return Row(
        claim="measurements that strangers published, each with its job, its cluster, its figure and its link",
        measured=f"{len(rows)}, of {len(clusters)} clusters",
        note="docs/published.md lists them, worst first.",
    )


@BENCHMARK.row("seconds")
def seconds(bench: Bench) -> Row:
    found = bench.found
    off = [each.off for each in found.values()]
    far = [key for key, each in found.items() if abs(each.off) > MOST]
    told = [key for key in far if bench.rows[key].reason]
    at = max(found, key=lambda key: abs(found[key].off))
    return Row(
        claim="predicted seconds of a step beside published ones: the median and the worst of all",
        measured=f"{median(off):.1%}; {worst(off):+.1%}; {len(told)} of {len(far)} explained",
        note=f"worst: {at}. Nothing is fitted: machines have their makers' peaks times the shares of the planner's "
        f"tables. {sum(each < 0 for each in off)} of {len(off)} predictions are below the measurement.",
    )


@BENCHMARK.row("memory")
def memory(bench: Bench) -> Row:
    off = [each.memory_off for each in bench.found.values() if each.memory_off is not None]
    return Row(
        claim="predicted peak of a device's memory beside published ones: the median and the worst",
        measured=f"{median(off):.1%}; {worst(off):+.1%}",
        note=f"{len(off)} figures. Some sources give what the allocator holds, others what it has reserved, which is "
        "more; the prediction is what it holds.",
    )


@BENCHMARK.row("order")
def order(bench: Bench) -> Row:
    rows = {key: bench.rows[key] for key in bench.found}
    judged = [(one.strategy != other.strategy, is_right(bench.found[one.key], bench.found[other.key]))
              for one, other in sources.pairs(rows)]  # fmt: skip
    decided = [right for _, right in judged if right is not None]
    of_strategies = [right for differ, right in judged if differ and right is not None]
    share = sum(decided) / max(1, len(decided))
    return Row(
        claim="two measurements of one model in one source: which trains more tokens a second on each GPU",
        measured=f"{share:.1%} of {len(decided)} pairs",
        note=f"{len(judged) - len(decided)} more pairs differ by 3 % or less as published, which is no order. Of "
        f"{len(of_strategies)} pairs of different strategies {sum(of_strategies)} are right.",
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
