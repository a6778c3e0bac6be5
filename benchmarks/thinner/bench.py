"""The runs that the rows share: the job of 10.8 M parameters in the lab, on 2 nodes x 2 ranks."""

from __future__ import annotations

from benchmarks.wire.bench import Bench as WireBench
from benchmarks.wire.bench import Key, Setup, opened
from laconic.compare.table import LEGEND, render
from tests.support.measure import Benchmark
from tests.support.record import Record

THINNER = Setup(job_file="thinner")
ACCUMULATED = Setup(job_file="thinner_accumulated")
FAST_BITS_PER_S, SLOW_BITS_PER_S = 200e6, 50e6


class Bench(WireBench):
    """`benchmarks.wire.bench.Bench` on this job."""

    home = THINNER

    def _steps(self, key: Key) -> int:
        """The number of steps of a case: few where a step takes long."""
        if self.quick:
            return 5
        return 8 if key.rate_bits_per_s == SLOW_BITS_PER_S else 12


def _table(bench: Bench) -> str:
    return render(list(bench.results.values()))


def _save(record: Record, bench: Bench) -> None:
    record.save(more=["The runs of the latest command:", _table(bench), LEGEND])


BENCHMARK = Benchmark(
    name="thinner",
    prepare=lambda options: opened(Bench(options.out, quick=options.quick), THINNER),
    save=_save,
    details=_table,
)
