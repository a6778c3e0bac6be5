"""Rows about step time and memory, measured in the lab.

[Note: The previous engine]
The previous engine did not compute gradients in their buckets. The row `step-time` compares the times of both engines:
both source trees run in the same lab, in turn. The previous tree is the parent of the commit that added `ADDED_FILE`.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks import previous
from laconic.compare import Case, Comparison, Result
from laconic.compare.progress import ConsoleReporter
from laconic.config import load
from tests.support.record import Row

_REPOSITORY = Path(__file__).parents[2]
ADDED_FILE = "src/laconic/shard/linear.py"
_NODES, _LOCAL = 2, 2
_STEPS, _REPEATS = 12, 3
_MEMORY_STRATEGIES = ("fsdp2", "host", "none")


def step_time(out: Path, *, quick: bool = False) -> Row:
    """Time full training with AdamW on an unshaped wire: this engine, FSDP2, and the previous engine."""
    repeats = 1 if quick else _REPEATS
    times: dict[str, list[float]] = {"fsdp2": [], "now": [], "before": []}
    revision = previous.parent_of_added(ADDED_FILE)
    with previous.source_at(revision, out) as source, _comparison("wire.toml", out / "step-time") as lab:
        for repeat in range(repeats):
            times["fsdp2"].append(_run(lab, "fsdp2", repeat).step_s)
            times["now"].append(_run(lab, "host", repeat).step_s)
            with previous.running(source):
                times["before"].append(_run(lab, "host", repeat + repeats).step_s)
    fsdp2, now, before = (statistics.median(times[name]) for name in ("fsdp2", "now", "before"))
    return Row(
        key="step-time",
        claim="step time on an unshaped wire, full training with AdamW, against FSDP2 / against the engine before",
        required="<= 0.75x / <= 1.00x",
        measured=f"{now / fsdp2:.3f}x / {now / before:.3f}x",
        is_met=now / fsdp2 <= 0.75 and now / before <= 1,
        note=(
            f"jobs/wire.toml, cache=host: {now:.3f} s, FSDP2 {fsdp2:.3f} s, before {before:.3f} s; medians of "
            f"{repeats} alternating runs each: now {_list(times['now'])}, before {_list(times['before'])}."
        ),
    )


def reserved(out: Path, *, quick: bool = False) -> Row:
    """Compare the peak memory of full training with FSDP2's, on a dense model and on one with fused experts."""
    ratios, each = {}, []
    for job in ("experts.toml", "wire.toml"):
        with _comparison(job, out / f"reserved-{job.removesuffix('.toml')}") as lab:
            peaks = {name: _peak(lab.run(Case(strategy=name, steps=3))) for name in _MEMORY_STRATEGIES}
        ratios[job] = {name: peaks[name] / peaks["fsdp2"] for name in ("host", "none")}
        each.append(
            f"{job}: host {peaks['host'] / 1e6:.1f}, none {peaks['none'] / 1e6:.1f}, "
            f"FSDP2 {peaks['fsdp2'] / 1e6:.1f} MB"
        )
    mix = ratios["experts.toml"]
    return Row(
        key="reserved",
        claim="reserved memory against FSDP2, on a unit mix like GPT-OSS's",
        required="<= 0.88x",
        measured=f"host {mix['host']:.3f}x, none {mix['none']:.3f}x",
        is_met=max(mix.values()) <= 0.88,
        note=(
            "fused experts whose number the ranks do not divide; the most that torch's allocator held on a rank in a "
            f"step; {'; '.join(each)} (the dense model: host {ratios['wire.toml']['host']:.3f}x, none "
            f"{ratios['wire.toml']['none']:.3f}x)."
        ),
    )


def _comparison(job: str, out: Path) -> Comparison:
    return Comparison(
        load(_REPOSITORY / "benchmarks" / "jobs" / job), out, nodes=_NODES, local=_LOCAL, reporter=ConsoleReporter()
    )


def _run(lab: Comparison, strategy: str, repeat: int) -> Result:
    return lab.run(Case(strategy=strategy, steps=_STEPS, measure_memory=False, log_every=100, repeat=repeat))


def _peak(result: Result) -> float:
    return result.allocated_peak_bytes or math.nan


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) + " s"
