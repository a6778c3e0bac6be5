"""The row `memory`: predicted peaks of device memory and host bytes, against the allocator and the engine's own count.

On a CPU both lie in the memory of one process, which the row `fits` limits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.plan.bench import Bench, any_cluster
from benchmarks.plan.jobs import PEERS, STRATEGIES, VARIANTS, Case, make_cases
from laconic.plan.prediction import Refusal
from tests.support.record import Row, Table

_NODES, _LOCAL = 2, 2
_WATCHED_STEP = 2
"""States exist by then, and caches are full. DDP makes its buckets anew in this very step, and the allocator sees them:
what rests, as the trainer counts it, leaves them out."""

NEW: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("demo", "none", ("weights stay",)),
    ("vocabulary", "device", ("weights stay",)),
    ("qwen2", "host", ("weights stay", "2 micro-batches")),
    ("demo", "host", ("offload",)),
    ("qwen2", "none", ("offload",)),
    ("gpt2", "4bit", ("offload", "2 micro-batches")),
    ("demo", "none", ("checks",)),
    ("vocabulary", "host", ("checks",)),
    ("gpt2", "4bit", ("checks every 2 steps",)),
    ("demo", "device", ("5 micro-batches",)),
    ("qwen2", "8bit", ("5 micro-batches",)),
    ("vocabulary", "4bit", ("checkpointing",)),
    ("gpt2", "zero++", ("checkpointing", "2 micro-batches")),
    ("demo", "host", ("NF4",)),
    ("qwen2", "none", ("NF4",)),
    ("vocabulary", "device", ("DoRA",)),
    ("experts", "host", ()),
    ("experts", "none", ("checkpointing",)),
    ("experts", "device", ("muon",)),
    ("qwen2", "none", ("shampoo",)),
)
"""Jobs with what no job had before."""
JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("demo", name, ()) for name in (*STRATEGIES, *PEERS) if name != "ddp-powersgd"),  # it has not begun by then
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
"""(model, strategy, variants) of each job. torch's profiler cannot watch the thread in which islands sync: the row
`fits` has them."""


def cases(bench: Bench) -> list[Case]:
    """The cases of `JOBS` and `NEW`, or a few of them."""
    found = []
    for model, strategy, variants in list(dict.fromkeys((*JOBS, *NEW)))[:: 12 if bench.quick else 1]:
        layers = [{"log": {"memory_step": _WATCHED_STEP}}, {**STRATEGIES, **PEERS}[strategy]]
        layers += [VARIANTS[variant] for variant in variants]
        jobs = [(", ".join((strategy, *variants)), layers, strategy)]
        found += make_cases(model, jobs, out=bench.out / "memory", steps=3)
    return found


def row(bench: Bench) -> Row:
    """Measure the row."""
    known = cases(bench)
    lines, device_errors, host_errors = [], {}, {}
    for case in known:
        (summary,) = bench.train([case], _NODES, _LOCAL)  # in fresh processes, where no earlier job has left memory
        estimate = bench.predictions.of(case, any_cluster(_NODES, _LOCAL))
        if isinstance(estimate, Refusal) or "error" in summary:
            print(f"{case.name}: {estimate if isinstance(estimate, Refusal) else summary['error']}", flush=True)
            continue
        said, measured = estimate.peak_bytes, summary["resting_bytes"] + summary["step_peak_bytes"]
        said_host, on_host = estimate.host_bytes, (summary["host_bytes_per_node"] or 0) / _LOCAL
        if case.config.shard.policy.offload:  # on a CPU shards and states rest in the one memory that there is
            said, said_host, measured, on_host = said + said_host, 0.0, measured + on_host, 0.0
        device_errors[case.name] = said / measured - 1
        cells = [case.name, _mb(said), _mb(measured), f"{device_errors[case.name]:+.2%}"]
        if on_host:
            host_errors[case.name] = said_host / on_host - 1
        cells += [_mb(said_host), _mb(on_host), f"{host_errors.get(case.name, 0):+.2%}" if on_host else ""]
        lines.append(cells)
        print(" | ".join(cells), flush=True)
    bench.tables["memory"] = Table(
        columns=("job", "device MB, said", "allocator", "", "host MB, said", "engine", ""), rows=lines
    )
    return _verdict(device_errors, host_errors)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"


def _verdict(device: Mapping[str, float], host: Mapping[str, float]) -> Row:
    kinds = {"device": device, "host": host}
    worst = {kind: _worst(errors) for kind, errors in kinds.items()}
    medians = {kind: statistics.median(map(abs, errors.values())) if errors else 0.0 for kind, errors in kinds.items()}
    return Row(
        key="memory",
        claim=f"device peak and host bytes against the allocator, {len(device)} jobs, {len(NEW)} of them never used "
        "before",
        measured="; ".join(f"{kind} {abs(worst[kind][1]):.2%} at worst, median {medians[kind]:.2%}" for kind in kinds),
        note="device: the peak of torch's allocator in a step, with what rests, in processes of its own for each job; "
        f"worst: {worst['device'][0]} ({worst['device'][1]:+.2%}). host: the engine's own count of its host cache.",
    )


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: abs(item[1]), default=("none", 0.0))
