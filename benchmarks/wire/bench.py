"""The runs that the rows share: 2 nodes x 2 ranks in the lab, full training and LoRA of jobs/wire.toml."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchmarkError, Options
from laconic.compare import Case, Comparison, ComparisonError, Result
from laconic.compare.case import Job, config_of
from laconic.compare.progress import ConsoleReporter
from laconic.compare.runner import explain_failure
from laconic.config import Config, load, to_toml
from laconic.lab import LabUnavailable

_JOB = Path(__file__).parents[1] / "jobs" / "wire.toml"
NODES, LOCAL = 2, 2
FLOAT32_BYTES = 4
RATES_BITS_PER_S = (1e9, 200e6, 100e6)
"""The rates at which full training is timed."""
LORA_RATE_BITS_PER_S = 100e6
SLOWEST_RATE_BITS_PER_S = 20e6


class Bench:
    """The results of all cases; each case runs once, when a row first needs it."""

    def __init__(self, comparison: Comparison, *, quick: bool) -> None:
        self.comparison = comparison
        self.quick = quick
        self.repeats = 1 if quick else 3
        self.loss_steps = 6 if quick else 50
        self.results: dict[tuple[Any, ...], Result] = {}
        """The results by job, rate, strategy and repeat."""
        self._compute_alone: dict[str, float] | None = None

    def result(self, strategy: str, job: Job = "full", rate_bits_per_s: float | None = None, repeat: int = 0) -> Result:
        """Return the result of one case."""
        key = (job, rate_bits_per_s, strategy, repeat)
        if key not in self.results:
            case = Case(
                strategy=strategy, job=job, rate_bits_per_s=rate_bits_per_s, repeat=repeat, steps=self._steps(*key),
                measure_memory=rate_bits_per_s is None and repeat == 0,
                log_every=1 if strategy == "fsdp2" else 100,  # a log crosses the wire, and some steps move fewer bytes
            )  # fmt: skip
            self.results[key] = self.comparison.run(case)
        return self.results[key]

    def _steps(self, job: Job, rate_bits_per_s: float | None, strategy: str, repeat: int) -> int:
        """The number of steps of a case. Cases with long steps take few steps."""
        if rate_bits_per_s is None and job == "full" and strategy in ("fsdp2", "host") and repeat == 0:
            return self.loss_steps
        if self.quick:
            return 4
        if rate_bits_per_s is None or (job == "lora" and strategy != "fsdp2"):
            return 12
        return 4 if job == "lora" else 6

    def step_s(self, strategy: str, job: Job = "full", rate_bits_per_s: float | None = None) -> float:
        """Return the seconds per step: the median over the repeats that `alternate` has run."""
        runs = [result for key, result in self.results.items() if key[:3] == (job, rate_bits_per_s, strategy)]
        return statistics.median(run.step_s for run in runs)

    def alternate(self, *cases: tuple[str, Job, float | None]) -> None:
        """Run the cases in turn, several times."""
        for repeat in range(self.repeats):
            for strategy, job, rate_bits_per_s in cases:
                self.result(strategy, job, rate_bits_per_s, repeat)

    def compute_alone(self) -> dict[str, float]:
        """Return the seconds of forward and backward of full training without communication."""
        if self._compute_alone is None:
            out = self.comparison.out
            config = config_of(self.comparison.base, Case(strategy="host"), out)
            job, answer = out / "alone.toml", out / "alone.json"
            job.write_text(to_toml(config), encoding="utf-8")
            command = ["-m", "benchmarks.compute_alone", str(job), str(5 if self.quick else 20), str(answer)]
            outcome = self.comparison.run_ranks(command, None)
            if outcome.exit_code:
                raise ComparisonError(f"compute alone failed: {explain_failure(outcome)}")
            self._compute_alone = json.loads(answer.read_text())
        return self._compute_alone


@contextmanager
def open_bench(options: Options) -> Iterator[Bench]:
    """Open the lab. Raises: BenchmarkError if this machine cannot make one."""
    base = load(_JOB)
    if options.quick:
        base = _shrink(base)
    try:
        comparison = Comparison(base, options.out, nodes=NODES, local=LOCAL, reporter=ConsoleReporter()).__enter__()
    except LabUnavailable as error:
        raise BenchmarkError(str(error)) from None
    with comparison:
        yield Bench(comparison, quick=options.quick)


def _shrink(base: Config) -> Config:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    assert isinstance(base.model.config, dict)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, config={**base.model.config, **sizes}),
        lora=dataclasses.replace(base.lora, rank=1),
    )


def wire_bytes(run: Result) -> float:
    """Return the bytes per node and step at the lab's interface."""
    assert run.wire_bytes is not None  # the lab has a wire
    return run.wire_bytes
