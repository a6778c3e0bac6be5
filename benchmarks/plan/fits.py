"""The row `fits`: jobs under a memory limit just above and just below the predicted need.

The limit is RLIMIT_DATA of every rank: the kernel refuses memory beyond it, as an accelerator's allocator does. It
counts all private memory of the process, so also Python, torch and the threads of Gloo.
"""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from typing import Any

from benchmarks.launch import launch
from benchmarks.plan.bench import Bench, any_cluster, columns
from benchmarks.plan.jobs import PEERS, STRATEGIES, VARIANTS, Case, make_cases
from benchmarks.plan.ranks import memory_bytes, train_all_watched
from benchmarks.record import Row
from laconic.config import to_dict
from laconic.plan.prediction import Refusal

_NODES, _LOCAL = 2, 1
_STEPS = 2
_EDGE = 0.002
JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("vocabulary", name, ()) for name in ("none", "host", "device", "8bit", "fsdp2", "ddp")),
    *(
        ("vocabulary", "host", (variant,))
        for variant in ("LoRA", "2 micro-batches", "bf16 parameters", "checkpointing")
    ),
    ("gpt2", "host", ()),
    ("qwen2", "none", ()),
)
"""(model, strategy, variants), of rows that fill hundreds of megabytes."""


def limited(job: dict[str, Any], limit_bytes: int) -> dict[str, int]:
    """Train under a limit. Runs on a rank."""
    before_bytes = memory_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    (summary,) = train_all_watched([job])
    if "error" in summary:
        raise RuntimeError(summary["error"])
    return {"before_bytes": before_bytes}


def _cases(bench: Bench) -> list[Case]:
    found = []
    for model, strategy, variants in JOBS[:: 6 if bench.quick else 1]:
        layers = [{**STRATEGIES, **PEERS}[strategy], *(VARIANTS[variant] for variant in variants)]
        layers.append({"train": {"micro_batch_size": 8}, "data": {"sequence_length": 128}})
        jobs = [(", ".join((strategy, *variants)), layers, strategy)]
        found += make_cases(model, jobs, out=bench.out / "fits", steps=_STEPS)
    return [case for case in found if not case.is_missing]


def _runs(case: Case, limit_bytes: int) -> bool:
    shutil.rmtree(case.config.train.output, ignore_errors=True)
    try:
        launch(limited, to_dict(case.config), limit_bytes, num_ranks=_NODES * _LOCAL, num_local=_LOCAL, timeout_s=120)
    except RuntimeError as error:
        print(f"  {str(error).strip().splitlines()[-1][:150]}", flush=True)
        return False
    return True


def row(bench: Bench) -> Row:
    """Measure the row."""
    lines, false_fits, false_misfits, refused = [], [], [], 0
    for case in _cases(bench):
        roomy = any_cluster(_NODES, _LOCAL)
        estimate = bench.predictions.of(case, roomy)
        assert not isinstance(estimate, Refusal), estimate
        edge_bytes = roomy.device_memory_bytes - estimate.spare_device_bytes / 0.97
        for limit in (edge_bytes * (1 + _EDGE), edge_bytes * (1 - _EDGE), edge_bytes - 0.6e9):
            tight = replace(roomy, device_memory_bytes=int(limit))
            again = bench.predictions.of(case, tight)
            assert not isinstance(again, Refusal), again
            runs = _runs(case, int(limit))
            if again.fits and not runs:
                false_fits.append(case.name)
            elif not again.fits and runs:
                false_misfits.append(case.name)
            refused += not again.fits and not runs
            lines.append([case.name, f"{limit / 1e6:.0f}", "fits" if again.fits else "does not fit",
                          "runs" if runs else "ends"])  # fmt: skip
            print(" | ".join(lines[-1]), flush=True)
    bench.tables["fits"] = columns(("job", "limit, MB", "said", "found"), lines)
    return Row(
        key="fits",
        claim="configurations said to fit that do not, under a memory limit at the edge",
        required="0 of >= 20 cases",
        measured=f"{len(false_fits)} of {len(lines)} cases",
        is_met=not false_fits and len(lines) >= 20,
        note=f"the limit is RLIMIT_DATA of each rank: 0.2 % above the predicted need, 0.2 % below it, and 600 MB less, "
        f"which is what the plan leaves to the process itself. {len(false_misfits)} were said not to fit and ran, and "
        f"{refused} ended as said." + (f" False: {', '.join(false_fits)}." if false_fits else ""),
    )
