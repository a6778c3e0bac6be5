"""`cache="auto"` beside every peer that fits in the same memory, over jobs, rates, clusters and memories."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from benchmarks.wire.bench import BENCHMARK, Bench, Job, Setup
from benchmarks.wire.contest import SLACK
from laconic.compare.case import Case, ComparisonError, config_of
from laconic.compare.runner import explain_failure
from laconic.config import to_dict
from laconic.lab import format_rate
from tests.support.record import Row

_JOB = "grid"
_SHAPES = ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (1, 4))
_RATES = (None, 1e9, 200e6, 50e6)
_PEERS = ("ddp", "ddp-zero1", "hsdp", "fsdp2", "fsdp2-two-level", "fsdp2-zero2", "fsdp2-hpz")
_MEMORIES = ("ddp", "hsdp", "fsdp2")
_FIXED = ("none", "device", "rank")
"""On a CPU the host's memory is the device's, so "host" is "device"."""
_FEWEST_TURNS = 3
"""Where the wire makes steps long, and so alike."""


@dataclass(frozen=True)
class Cell:
    """A job on a cluster at a rate, in the memory of a peer."""

    job: Job
    setup: Setup
    rate_bits_per_s: float | None
    memory: str
    figures: dict[str, Any]

    def __str__(self) -> str:
        rate = "unshaped" if self.rate_bits_per_s is None else format_rate(self.rate_bits_per_s)
        return f"{self.job} {self.setup} {rate}, memory of {self.memory}"

    def seconds(self, name: str) -> float:
        """The median of a contestant's steps."""
        return statistics.median(self.figures[name]["times_s"])

    def fitting(self, names: tuple[str, ...]) -> list[str]:
        """Those of `names` that took part and fit in the memory."""
        most = self.figures[self.memory]["peak_bytes"] * SLACK
        return [name for name in names if name in self.figures and self.figures[name]["peak_bytes"] <= most]

    def ratio(self, name: str, others: tuple[str, ...]) -> tuple[float, str]:
        """The seconds of laconic's contestant `name` against the fastest of `others` that fit, and which that is."""
        best = min(self.fitting(others), key=self.seconds)
        return self.seconds(f"{name}:{self.memory}") / self.seconds(best), best

    @property
    def memory_ratio(self) -> float:
        """The peak of auto's device memory against that which is allowed."""
        return float(self.figures[f"auto:{self.memory}"]["peak_bytes"] / self.figures[self.memory]["peak_bytes"])


@lru_cache(maxsize=1)  # the rows share them
def measured(bench: Bench) -> tuple[Cell, ...]:
    """Measure all cells, or a few of a quick bench."""
    return tuple(_cells(bench))


def _cells(bench: Bench) -> Iterator[Cell]:
    shapes, rates = (_SHAPES[3:4], _RATES[2:3]) if bench.quick else (_SHAPES, _RATES)
    for nodes, local in shapes:
        setup = Setup(nodes, local, _JOB)
        for job in get_args(Job):
            for rate in rates if nodes > 1 else (None,):
                figures = _contest(bench, setup, job, rate)
                for memory in _MEMORIES:
                    if memory in figures:
                        yield Cell(job, setup, rate, memory, figures)


def _contest(bench: Bench, setup: Setup, job: Job, rate: float | None) -> dict[str, Any]:
    """The figures of all contestants on one cluster."""
    comparison = bench.comparison(setup)
    base = dataclasses.replace(comparison.base, log=dataclasses.replace(comparison.base.log, jsonl=False))

    def keys(strategy: str, **changes: Any) -> dict[str, Any]:
        config = to_dict(config_of(base, Case(strategy=strategy, job=job), comparison.out))
        return {**config, "shard": {**config["shard"], **changes}}

    kept = [name for name in (*_PEERS, *_FIXED) if _runs(name, setup)]
    limited = {"auto": keys("auto-cache")}
    if setup.nodes > 1 and rate is not None:
        limited["auto-4bit"] = keys("auto-cache", wire="4bit")
    name = f"{setup}-{job}-{rate}".replace(" ", "")
    given, answer = comparison.out / f"{name}.json", comparison.out / f"{name}-figures.json"
    jobs = {each: keys(each) for each in kept}
    given.write_text(
        json.dumps({"jobs": jobs, "limited": limited, "fewest_turns": 1 if bench.quick else _FEWEST_TURNS})
    )
    outcome = comparison.run_ranks(["-m", "benchmarks.wire.contest", str(given), str(answer)], rate)
    if not answer.exists():
        raise ComparisonError(f"{setup} {job}: {explain_failure(outcome)}")
    figures: dict[str, Any] = json.loads(answer.read_text())
    return figures


def _runs(name: str, setup: Setup) -> bool:
    """Whether a strategy is something else than another one on this cluster."""
    if name in ("hsdp", "fsdp2-hpz", "fsdp2-two-level", "device") and setup.nodes == 1:
        return False
    return not (name in ("hsdp", "fsdp2-hpz", "fsdp2-two-level") and setup.local == 1)


@BENCHMARK.row("grid-peers", section="placement")
def grid_peers(bench: Bench) -> Row:
    """`cache="auto"` against every peer."""
    cells = measured(bench)
    ratios = sorted((*cell.ratio("auto", _PEERS), str(cell)) for cell in cells)
    median, worst = statistics.median(ratio for ratio, *_ in ratios), ratios[-1][0]
    most = max(cell.memory_ratio for cell in cells)
    return Row(
        claim='step time, `cache="auto"` against the best peer that fits in the same memory, exact wire: the median of '
        "cells, the worst; the most device memory against the one allowed",
        measured=f"{median:.3f}x, {worst:.3f}x; {most:.3f}x",
        note=(
            f"{_how(cells)} {_by_job_and_rate(cells)}. {_listed(ratios)}. Where no wire is slow, processors are "
            "the bound, and each unit has work of its own in Python; a LoRA here moves little but messages."
        ),
    )


@BENCHMARK.row("grid-fixed", section="placement")
def grid_fixed(bench: Bench) -> Row:
    """`cache="auto"` against every fixed placement."""
    cells = measured(bench)
    ratios = sorted((*cell.ratio("auto", _FIXED), str(cell)) for cell in cells)
    return Row(
        claim='step time, `cache="auto"` against the best fixed placement that fits: the worst of cells, the median',
        measured=f"{ratios[-1][0]:.3f}x, {statistics.median(ratio for ratio, *_ in ratios):.3f}x",
        note=f"{_how(cells)} {_listed(ratios)}.",
    )


@BENCHMARK.row("grid-4bit", section="placement")
def grid_4bit(bench: Bench) -> Row:
    """The same in four bits where the wire is shaped."""
    cells = [cell for cell in measured(bench) if f"auto-4bit:{cell.memory}" in cell.figures]
    ratios = sorted(cell.ratio("auto-4bit", _PEERS)[0] for cell in cells)
    median = statistics.median(ratios)
    return Row(
        claim='step time, `cache="auto"` with `wire="4bit"` against the best peer that fits, where the wire is shaped: '
        "the median of cells",
        measured=f"{median:.3f}x",
        note=f"{_how(cells)} From {ratios[0]:.3f}x to {ratios[-1]:.3f}x.",
    )


def _how(cells: Sequence[Cell]) -> str:
    turns = sorted(len(cell.figures["ddp"]["times_s"]) for cell in cells)
    return (
        f"{len(cells)} cells of full training and LoRA, a Llama of 2.3 M parameters, 256 tokens a rank; medians of "
        f"{turns[0]} to {turns[-1]} steps in turns, more where they are short, in the same processes."
    )


def _by_job_and_rate(cells: Sequence[Cell]) -> str:
    """The medians of each job, and of each rate."""
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        rate = "unshaped" if cell.rate_bits_per_s is None else format_rate(cell.rate_bits_per_s)
        for key in (cell.job, f"{cell.job} {rate}"):
            ratios.setdefault(key, []).append(cell.ratio("auto", _PEERS)[0])
    return "Medians: " + ", ".join(f"{key} {statistics.median(found):.3f}x" for key, found in ratios.items())


def _listed(ratios: list[tuple[float, str, str]]) -> str:
    """The worst cells, and how many are met."""
    worst = "; ".join(f"{cell}: {ratio:.3f}x of {best}" for ratio, best, cell in ratios[::-1][:6])
    return f"{sum(ratio <= 1 for ratio, *_ in ratios)} are at most 1.00x; the worst: {worst}"
