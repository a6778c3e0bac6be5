"""The row `pipelines`: predicted seconds, bytes and memory of pipelines, against runs in the lab."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.plan.bench import Bench
from benchmarks.plan.jobs import VARIANTS, make_cases
from benchmarks.plan.lab import WARM_STEPS, Run
from tests.support.record import Row, Table

_PIPELINES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1F1B"},
    "1F1B, 8 micro-batches": {"schedule": "1F1B", "micro_batches": 8},
    "Eager1F1B": {"schedule": "Eager1F1B", "micro_batches": 8},
    "1F1B, 8 bits": {"schedule": "1F1B", "wire": "8bit"},
    "GPipe": {"schedule": "GPipe", "micro_batches": 8},
    "Interleaved1F1B": {"schedule": "Interleaved1F1B"},
    "LoopedBFS": {"schedule": "LoopedBFS"},
}
_RUNS: tuple[tuple[str, str, str, str, tuple[int, int], float | None], ...] = (
    ("demo", "1F1B", "rank", "", (2, 2), 200e6),
    ("demo", "GPipe", "host", "", (2, 2), 200e6),
    ("gpt2", "1F1B", "rank", "", (2, 2), 200e6),
    ("deep", "LoopedBFS", "rank", "", (2, 2), 200e6),
    ("demo", "1F1B, 8 micro-batches", "rank", "bf16 parameters", (2, 2), 50e6),
    ("demo", "Interleaved1F1B", "rank", "", (2, 2), 50e6),
    ("demo", "1F1B, 8 bits", "rank", "", (2, 2), 50e6),
    ("qwen2", "1F1B", "none", "", (2, 2), 50e6),
    ("deep", "1F1B", "rank", "", (2, 2), 20e6),
    ("vocabulary", "1F1B", "rank", "", (2, 2), 20e6),
    ("demo", "1F1B", "host", "checkpointing", (2, 2), None),
    ("deep", "Interleaved1F1B", "rank", "adamw8bit", (2, 2), None),
    ("deep", "1F1B", "none", "", (3, 1), 100e6),
    ("deep", "Eager1F1B", "rank", "", (2, 2), 50e6),
    ("gpt2", "1F1B, 8 micro-batches", "rank", "", (2, 1), 50e6),
)
"""(model, pipeline, cache, variant, cluster, rate) of each run. No rule of the planner was made from one of them."""
_STEPS, _ACCUMULATION = 8, 2


def row(bench: Bench) -> Row:
    """Measure the row."""
    found = _runs(bench)
    seconds = sorted((abs(run.seconds_error), run.name) for run in found)
    memory = sorted((abs(run.memory_error), run.name) for run in found)
    median, (worst, which) = statistics.median(error for error, _ in seconds), seconds[-1]
    bench.tables["pipelines"] = Table(
        columns=("run", "s, said", "measured", "", "wire MB, said", "measured", "", "device MB, said", "measured", ""),
        rows=[[run.name, f"{run.estimate.seconds:.3f}", f"{run.seconds:.3f}", f"{run.seconds_error:+.1%}",
          f"{run.estimate.interface_bytes / 1e6:.3f}", f"{run.wire_bytes / 1e6:.3f}", f"{run.bytes_error:+.1%}",
          f"{run.estimate.peak_bytes / 1e6:.2f}", f"{run.peak_bytes / 1e6:.2f}", f"{run.memory_error:+.1%}"]
         for run in found],
    )  # fmt: skip
    return Row(
        key="pipelines",
        claim=f"seconds and device memory of pipelines, {len(found)} runs in the lab that were never fitted",
        measured=f"median {median:.1%}, worst {worst:.1%}; memory within {memory[-1][0]:.1%}",
        note=f"worst in seconds: {which}; in memory: {memory[-1][1]}. Cluster files were measured before the runs, one "
        "for each cluster and rate. Messages of a few kilobytes weigh more at the interface than the headers of large "
        "ones, by which bytes are said.",
    )


def _runs(bench: Bench) -> list[Run]:
    found = []
    for model, pipeline, cache, variant, (nodes, local), rate in _RUNS[:: 4 if bench.quick else 1]:
        sections = [
            {"data": {"sequence_length": 128}, "train": {"micro_batch_size": 4, "accumulation": _ACCUMULATION}},
            {"log": {"memory_step": WARM_STEPS}, "shard": {"cache": cache}},
            {"pipeline": {"stages": "nodes", **_PIPELINES[pipeline]}},
            *([VARIANTS[variant]] if variant else []),
        ]
        name = ", ".join(filter(None, (pipeline, f"cache {cache}", variant)))
        cases = make_cases(model, [(name, sections, "pipeline")], out=bench.out / "pipelines", steps=_STEPS)
        found += bench.lab.runs(cases, nodes, local, rate)
    return found
