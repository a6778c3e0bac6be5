"""The row `fits`: jobs under a memory limit just above and just below the predicted need.

The limit is RLIMIT_DATA of every rank: the kernel refuses memory beyond it, as an accelerator's allocator does. It
counts all private memory of a process, so also Python, torch and the stacks of Gloo's threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.plan.bench import Bench, any_cluster
from benchmarks.plan.jobs import ISLANDS, PEERS, STRATEGIES, VARIANTS, Case, candidate_of, make_cases
from benchmarks.plan.processes import runs_within
from laconic.plan.estimates import MARGIN
from laconic.plan.prediction import Refusal
from tests.support.record import Row, Table

NODES, LOCAL = 2, 1
_STEPS = 4
"""In the last of these all memory is in use: DDP makes its buckets anew in the second."""
_LIMITS = (1.002, 0.998, 0.9)
"""The limits, in multiples of the predicted need. The last shows that a limit ends jobs at all."""
JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("vocabulary", name, ()) for name in ("none", "host", "device", "8bit", "fsdp2", "ddp")),
    *(
        ("vocabulary", "host", (variant,))
        for variant in ("LoRA", "2 micro-batches", "bf16 parameters", "checkpointing")
    ),
    ("gpt2", "host", ()),
    ("qwen2", "none", ()),
    ("vocabulary", "islands int4", ()),
)
"""(model, strategy, variants)"""


def cases(bench: Bench) -> list[Case]:
    """The cases of `JOBS`, or a few of them."""
    return [case for job in JOBS[:: 6 if bench.quick else 1] for case in _large_cases(bench, *job)]


def _large_cases(bench: Bench, model: str, strategy: str, variants: Sequence[str]) -> list[Case]:
    """The case of a job whose rows fill hundreds of megabytes."""
    tables = {**STRATEGIES, **ISLANDS, **PEERS}
    layers = [tables[strategy], *(VARIANTS[variant] for variant in variants)]
    layers.append({"train": {"micro_batch_size": 8}, "data": {"sequence_length": 128}})
    jobs = [(", ".join((strategy, *variants)), layers, candidate_of(strategy))]
    return make_cases(model, jobs, out=bench.out / "fits", steps=_STEPS)


def row(bench: Bench) -> Row:
    """Measure the row."""
    lines, false_fits, false_misfits, refused = [], [], [], 0
    for case in cases(bench):
        roomy = any_cluster(NODES, LOCAL)
        estimate = bench.predictions.of(case, roomy)
        assert not isinstance(estimate, Refusal), estimate
        need_bytes = roomy.device_memory_bytes - estimate.spare_device_bytes / (1 - MARGIN)
        for factor in _LIMITS:
            tight = replace(roomy, device_memory_bytes=int(factor * need_bytes))
            again = bench.predictions.of(case, tight)
            assert not isinstance(again, Refusal), again
            runs = runs_within(tight.device_memory_bytes, case, NODES, LOCAL)
            if again.fits and not runs:
                false_fits.append(case.name)
            false_misfits += [factor] * (not again.fits and runs)
            refused += not again.fits and not runs
            lines.append([case.name, f"{need_bytes / 1e6:.1f}", f"{tight.device_memory_bytes / 1e6:.1f}",
                          "fits" if again.fits else "does not fit", "runs" if runs else "ends"])  # fmt: skip
            print(" | ".join(lines[-1]), flush=True)
    bench.tables["fits"] = Table(columns=("job", "need, MB, said", "limit, MB", "said", "found"), rows=lines)
    return Row(
        key="fits",
        claim="configurations said to fit that do not, under a memory limit at the edge",
        measured=f"{len(false_fits)} of {len(lines)} cases",
        note="the limit is RLIMIT_DATA of each rank, which is a fresh process: 0.2 % above the predicted need, 0.2 % "
        f"below it, and 10 % below it; {len(lines) // len(_LIMITS)} jobs. The need has {MARGIN:.0%} for fragments and "
        "0.6 GB for the process itself, the stacks of threads included. Of the cases said not to fit, "
        f"{refused} ended and {len(false_misfits)} ran, {sum(each < 0.95 for each in false_misfits)} of these "
        "with 10 % less." + (f" False: {', '.join(false_fits)}." if false_fits else ""),
    )
