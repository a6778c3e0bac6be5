"""The runs that the rows share: the job of 10.8 M parameters in the lab, on 2 nodes x 2 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.wire.bench import Bench as WireBench
from benchmarks.wire.bench import Key, Setup
from laconic.lab import LabUnavailable
from tests.support.measure import BenchmarkError, Options

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


@contextmanager
def open_bench(options: Options) -> Iterator[Bench]:
    """Open the lab. Raises: BenchmarkError if this machine cannot make one."""
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Bench(options.out.absolute(), quick=options.quick)) as bench:
        try:
            bench.comparison(THINNER)
        except LabUnavailable as error:
            raise BenchmarkError(str(error)) from None
        yield bench
