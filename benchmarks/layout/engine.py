"""Rows about step time and memory, measured in the lab.

[Note: The previous engine]
The previous engine did not compute gradients in their buckets. The row `step-time` compares the times of both engines:
both source trees run in the same lab, in turn. The previous tree is the parent of the commit that added `ADDED_FILE`.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import tomli_w

from benchmarks.record import Row
from laconic.compare import Case, Comparison, Result, runner
from laconic.compare.progress import ConsoleReporter
from laconic.config import Config, load, to_toml

_REPOSITORY = Path(__file__).parents[2]
ADDED_FILE = "src/laconic/shard/linear.py"
_NODES, _LOCAL = 2, 2
_STEPS, _REPEATS = 12, 3
_MEMORY_STRATEGIES = ("fsdp2", "host", "none")


def step_time(out: Path, *, quick: bool = False) -> Row:
    """Time full training with AdamW on an unshaped wire: this engine, FSDP2, and the previous engine."""
    repeats = 1 if quick else _REPEATS
    times: dict[str, list[float]] = {"fsdp2": [], "now": [], "before": []}
    with _previous_source(out) as previous, _comparison("wire.toml", out / "step-time") as lab:
        for repeat in range(repeats):
            times["fsdp2"].append(_run(lab, "fsdp2", repeat).step_s)
            times["now"].append(_run(lab, "host", repeat).step_s)
            with _importing_from(previous / "src"), _jobs_without_defaults():
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


@contextmanager
def _previous_source(out: Path) -> Iterator[Path]:
    """Check out the previous source tree, and remove it at the end: [Note: The previous engine]."""
    added = _git("log", "--diff-filter=A", "--format=%H", "-1", "--", ADDED_FILE)
    folder = out.absolute() / "before"
    shutil.rmtree(folder, ignore_errors=True)
    _git("worktree", "prune")
    _git("worktree", "add", "--detach", "--force", str(folder), f"{added}^")
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


@contextmanager
def _importing_from(source: Path) -> Iterator[None]:
    """Let processes that start in the body import laconic from `source`."""
    with mock.patch.dict(os.environ, PYTHONPATH=str(source)):
        yield


@contextmanager
def _jobs_without_defaults() -> Iterator[None]:
    """Leave the values at their defaults out of job files: the previous tree does not know keys that came later."""
    defaults = tomllib.loads(to_toml(Config()))

    def to_short_toml(config: Config) -> str:
        sections = {}
        for section, values in tomllib.loads(to_toml(config)).items():
            default = defaults.get(section, {})
            sections[section] = {key: value for key, value in values.items() if value != default.get(key)}
        return tomli_w.dumps({section: values for section, values in sections.items() if values})

    with mock.patch.object(runner, "to_toml", to_short_toml):
        yield


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_REPOSITORY), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
