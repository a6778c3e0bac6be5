"""The row `memory`: predicted peaks of device memory and host bytes, against the allocator and the process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.plan.bench import Bench, any_cluster, columns
from benchmarks.plan.jobs import PEERS, STRATEGIES, VARIANTS, Case, make_cases
from benchmarks.record import Row
from laconic.plan.prediction import Refusal

_NODES, _LOCAL = 2, 2
_WATCHED_STEP = 2  # states exist by then, and caches are full
_MOST, _MEDIAN = 0.05, 0.02

ISLANDS_AT_REST: dict[str, dict[str, Any]] = {
    "islands int4": {"sync": {"codec": "int4", "every": 4}},
    "islands int4, 2 slices": {"sync": {"codec": "int4", "every": 4, "slices": 2}},
}
"""Islands whose watched step has no sync. A sync works in host memory, which is the device's here."""

JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("demo", name, ()) for name in (*STRATEGIES, *ISLANDS_AT_REST, *PEERS)),
    *(("demo", "host", (variant,)) for variant in VARIANTS),
    *(("demo", name, ("LoRA",)) for name in ("none", "device")),
    *(("gpt2", name, ()) for name in ("none", "host", "4bit", "fsdp2")),
    *(("gpt2", "host", (variant,)) for variant in ("checkpointing", "muon")),
    *(("qwen2", name, ()) for name in ("none", "host", "device", "ddp")),
    *(("qwen2", "host", (variant,)) for variant in ("LoRA", "adamw8bit", "checkpointing")),
    *(("vocabulary", name, ()) for name in ("none", "host", "8bit", "hsdp")),
    *(("vocabulary", "host", (variant,)) for variant in ("2 micro-batches", "bf16 parameters", "shampoo")),
    *(("deep", name, ()) for name in ("none", "host", "device", "zero++")),
    *(("deep", "host", (variant,)) for variant in ("checkpointing", "LoRA")),
    ("deep", "none", ("checkpointing", "LoRA")),
    ("deep", "device", ("bf16 parameters", "2 micro-batches", "adamw8bit")),
)
"""(model, strategy, variants) of each job."""


def cases(bench: Bench) -> list[Case]:
    """The cases of `JOBS`, or a few of them."""
    found = []
    for model, strategy, variants in JOBS[:: 12 if bench.quick else 1]:
        layers = [{"log": {"memory_step": _WATCHED_STEP}}, {**STRATEGIES, **ISLANDS_AT_REST, **PEERS}[strategy]]
        layers += [VARIANTS[variant] for variant in variants]
        candidate = "local-steps" if strategy in ISLANDS_AT_REST else strategy
        jobs = [(", ".join((strategy, *variants)), layers, candidate)]
        found += make_cases(model, jobs, out=bench.out / "memory", steps=3)
    return found


def row(bench: Bench) -> Row:
    """Measure the row."""
    every = cases(bench)
    missing = [case.name for case in every if case.is_missing]
    known = [case for case in every if not case.is_missing]
    lines, device_errors, host_errors = [], {}, {}
    for case, summary in zip(known, bench.train(known, _NODES, _LOCAL), strict=True):
        estimate = bench.predictions.of(case, any_cluster(_NODES, _LOCAL))
        if isinstance(estimate, Refusal) or "error" in summary:
            print(f"{case.name}: {estimate if isinstance(estimate, Refusal) else summary['error']}", flush=True)
            continue
        measured = summary["resting_bytes"] + summary["step_peak_bytes"]
        on_host = (summary["host_bytes_per_node"] or 0) / _LOCAL
        device_errors[case.name] = estimate.peak_bytes / measured - 1
        cells = [case.name, _mb(estimate.peak_bytes), _mb(measured), f"{device_errors[case.name]:+.2%}"]
        if on_host:
            host_errors[case.name] = estimate.host_bytes / on_host - 1
        cells += [_mb(estimate.host_bytes), _mb(on_host), f"{host_errors.get(case.name, 0):+.2%}" if on_host else ""]
        cells += [_mb(estimate.peak_bytes + estimate.host_bytes), _mb(summary["grown_bytes"])]
        lines.append(cells)
        print(" | ".join(cells), flush=True)
    bench.tables["memory"] = columns(
        ("job", "device MB, said", "allocator", "", "host MB, said", "engine", "", "both, said", "process grew"), lines
    )
    return _verdict(device_errors, host_errors, missing)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"


def _verdict(device: Mapping[str, float], host: Mapping[str, float], missing: list[str]) -> Row:
    worst, median = _worst(device), statistics.median(map(abs, device.values()))
    host_worst = _worst(host)
    host_median = statistics.median(map(abs, host.values())) if host else 0.0
    return Row(
        key="memory",
        claim=f"device peak and host bytes against the allocator and the process, {len(device)} jobs",
        required=f"within {_MOST:.0%} each, median <= {_MEDIAN:.0%}, >= 24 jobs",
        measured=f"device {abs(worst[1]):.2%} at worst, median {median:.2%}; host {abs(host_worst[1]):.2%} at worst, "
        f"median {host_median:.2%}",
        is_met=max(abs(worst[1]), abs(host_worst[1])) <= _MOST and max(median, host_median) <= _MEDIAN
        and len(device) >= 24,
        note=f"worst: {worst[0]} ({worst[1]:+.2%})."
        + (f" The planner has no program for {', '.join(missing)}." if missing else ""),
    )  # fmt: skip


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: abs(item[1]), default=("none", 0.0))
