"""The runs that the rows share: a job in the lab, on 2 nodes x 2 ranks or on other clusters."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from laconic.compare.case import STRATEGIES, Case, Job
from laconic.compare.progress import ConsoleReporter
from laconic.compare.result import Result
from laconic.compare.runner import Comparison
from laconic.config import Config, from_dict
from laconic.lab import LabUnavailable
from tests.support.measure import Benchmark, BenchmarkError
from tests.support.step_bytes import StepBytes, step_bytes

_JOBS = Path(__file__).parents[1] / "jobs"
FLOAT32_BYTES = 4
RATE_BITS_PER_S = 200e6
"""The rate at which strategies are compared."""
LORA_RATE_BITS_PER_S = 100e6
HPZ_RATE_BITS_PER_S = 50e6
"""The rate at which LoRA is compared with strategies that keep weights on a node's devices."""


@dataclass(frozen=True, order=True)
class Setup:
    """A cluster, and the job that it trains: a file below jobs/, with changes."""

    nodes: int = 2
    local: int = 2
    job_file: str = "wire"
    is_half: bool = False
    """Whether weights are gathered, and products are made, in bf16."""
    accumulation: int = 0
    """The micro-batches of a step; 0: those of the file."""
    schedule: str = ""
    """The order of a pipeline's micro-batches; empty: that of the file."""

    def __str__(self) -> str:
        return f"{self.nodes} x {self.local}"

    def job(self) -> Config:
        """Return the training job."""
        job = tomllib.loads((_JOBS / f"{self.job_file}.toml").read_text(encoding="utf-8"))
        if self.is_half:
            job.setdefault("shard", {})["param_dtype"] = "bfloat16"
        if self.accumulation:
            job["train"]["accumulation"] = self.accumulation
        if self.schedule:
            job["pipeline"]["schedule"] = self.schedule
        return from_dict(Config, job)

    def folder(self) -> str:
        """Return the name of a folder for its runs."""
        changes = "-half" * self.is_half + f"-{self.accumulation}" * bool(self.accumulation)
        changes += f"-{self.schedule}" * bool(self.schedule)
        return f"{self.job_file}{changes}-{self.nodes}x{self.local}"


HOME = Setup()
"""Where rows that name no cluster are measured."""
FLAT = Setup(nodes=4, local=1)
CLUSTERS = tuple(Setup(nodes, local) for local in (1, 2) for nodes in (2, 4, 8))
"""The clusters on which all strategies are compared."""
COMPARED = ("fsdp2", "hsdp", "ddp", "host")
"""The strategies of a comparison, the strongest baseline first."""


B = TypeVar("B", bound="Bench")


class Key(NamedTuple):
    """The fields in which two runs differ. Keys sort in the order in which the tables show the runs."""

    setup: Setup
    job: Job
    rate_bits_per_s: float | None
    strategy: str
    repeat: int


class Times(dict[str, float]):
    """The seconds of a step by strategy: the medians of its runs."""

    def __init__(self, runs: Mapping[str, Sequence[float]]) -> None:
        super().__init__({name: statistics.median(seconds) for name, seconds in runs.items()})
        self.runs = runs
        """The seconds of each run, which took turns."""


class Bench:
    """The results of all cases; each case runs once, when a row first needs it."""

    home = HOME
    """The setup whose first unshaped runs are watched for memory."""

    def __init__(self, out: Path, *, quick: bool) -> None:
        self.out, self.quick = out, quick
        self.repeats = 1 if quick else 3
        self.loss_steps = 6 if quick else 50
        self.clusters = (HOME, FLAT) if quick else CLUSTERS
        self.results: dict[Key, Result] = {}
        self._comparisons: dict[Setup, Comparison] = {}
        self._reporter = ConsoleReporter()
        self._labs = contextlib.ExitStack()

    def close(self) -> None:
        """Close all labs."""
        self._labs.close()

    def comparison(self, setup: Setup = HOME) -> Comparison:
        """Return the comparison of a setup, whose lab stays open. Raises: LabUnavailable."""
        if setup not in self._comparisons:
            base = setup.job()
            base = dataclasses.replace(base, data=dataclasses.replace(base.data, cache=str(self.out / "tokens")))
            comparison = Comparison(
                _shrink(base) if self.quick else base, self.out / setup.folder(),
                nodes=setup.nodes, local=setup.local, reporter=self._reporter,
            )  # fmt: skip
            self._comparisons[setup] = self._labs.enter_context(comparison)
        return self._comparisons[setup]

    def result(
        self, strategy: str, job: Job = "full", rate_bits_per_s: float | None = None, repeat: int = 0,
        setup: Setup = HOME,
    ) -> Result:  # fmt: skip
        """Return the result of one case."""
        key = Key(setup, job, rate_bits_per_s, strategy, repeat)
        if key not in self.results:
            case = Case(
                strategy=strategy, job=job, rate_bits_per_s=rate_bits_per_s, repeat=repeat, steps=self._steps(key),
                measure_memory=setup == self.home and rate_bits_per_s is None and repeat == 0,
                log_every=100,  # logs cross the wire too, and some steps move little
            )  # fmt: skip
            self.results[key] = self.comparison(setup).run(case)
        return self.results[key]

    def times(
        self, names: Sequence[str], job: Job = "full", rate_bits_per_s: float | None = None, setup: Setup = HOME
    ) -> Times:
        """Run strategies in turn, several times."""
        repeats = range(self.repeats)
        runs = [{name: self.result(name, job, rate_bits_per_s, repeat, setup) for name in names} for repeat in repeats]
        return Times({name: [run[name].step_s for run in runs] for name in names})

    def _steps(self, key: Key) -> int:
        """The number of steps of a case: few where a step takes long."""
        is_shaped, is_whole = key.rate_bits_per_s is not None, key.job == "full"
        if key.setup == HOME and not is_shaped and is_whole and key.strategy in ("fsdp2", "host") and key.repeat == 0:
            return self.loss_steps
        if self.quick or key.setup not in (HOME, FLAT):
            return 4
        if not is_shaped or (not is_whole and key.strategy == "host"):
            return 12
        return 6 if is_whole else 4


@contextmanager
def opened(bench: B, setup: Setup = HOME) -> Iterator[B]:
    """Open the lab of a setup. Raises: BenchmarkError if this machine cannot make one."""
    with contextlib.closing(bench):
        try:
            bench.comparison(setup)
        except LabUnavailable as error:
            raise BenchmarkError(str(error)) from None
        yield bench


BENCHMARK = Benchmark(
    measures=("laconic.comm", "laconic.layout", "laconic.ragged", "laconic.shard"),
    name="wire",
    prepare=lambda options: opened(Bench(options.out, quick=options.quick)),
)


def _shrink(base: Config) -> Config:
    assert isinstance(base.model.config, dict)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, config={**base.model.config, **sizes}),
        lora=dataclasses.replace(base.lora, rank=1),
    )


def seconds_of(times: Mapping[str, float]) -> str:
    """Return the seconds of a step of each strategy in words."""
    return ", ".join(f"{STRATEGIES[name].label} {time:.3f} s" for name, time in times.items())


def wire_bytes(run: Result) -> float:
    """Return the bytes per node and step at the lab's interface."""
    assert run.wire_bytes is not None  # the lab has a wire
    return run.wire_bytes


def formula_bytes(run: Result) -> StepBytes:
    """Return the predicted bytes of a run in fp32: [Note: Bytes of a step] in tests/support/step_bytes.py."""
    return step_bytes(
        run.strategy,
        nodes=run.num_nodes,
        local=run.num_local,
        weights_bytes=run.num_parameters * FLOAT32_BYTES,
        gradients_bytes=run.num_trainable * FLOAT32_BYTES,
        frozen_bytes=(run.num_parameters - run.num_trainable) * FLOAT32_BYTES,
    )


def result_key(result: Result) -> tuple[Any, ...]:
    """Return what makes a recorded run the same as another. Its folder names job, rate, strategy and repeat."""
    return result.output, result.num_nodes, result.num_local, result.num_parameters
