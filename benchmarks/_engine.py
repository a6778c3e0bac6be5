"""What ragged buckets without copies are worth in time and memory: rows of benchmarks/layout.py, measured in the lab.

[Note: The engine before]
The step is timed against the engine as it was before gradients were computed in their buckets, by running that source
tree in the same lab, in turn with this one. The tree is the parent of the commit that added `BEFORE_FILE`.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from record import Row

from laconic.compare import Case, Comparison, Result, runner
from laconic.compare.progress import make_reporter
from laconic.config.job import Config, load, to_toml

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parent
BEFORE_FILE = "src/laconic/shard/linear.py"
_NODES, _LOCAL = 2, 2
_STEPS, _REPEATS = 12, 3
_MEMORY_STRATEGIES = ("fsdp2", "host", "none")


def step_time(out: Path, *, quick: bool = False) -> Row:
    """Full training with AdamW on an unshaped wire: this engine, FSDP2, and the engine before."""
    repeats = 1 if quick else _REPEATS
    times: dict[str, list[float]] = {"fsdp2": [], "now": [], "before": []}
    with _source_before(out) as before, _comparison("wire.toml", out / "step-time") as lab:
        for repeat in range(repeats):
            times["fsdp2"].append(_run(lab, "fsdp2", repeat).step_s)
            times["now"].append(_run(lab, "host", repeat).step_s)
            with _importing_from(before / "src"), _jobs_without_defaults():
                times["before"].append(_run(lab, "host", repeat + repeats).step_s)
    fsdp2, now, then = (statistics.median(times[name]) for name in ("fsdp2", "now", "before"))
    return Row(
        key="step-time",
        claim="step time on an unshaped wire, full training with AdamW, against FSDP2 / against the engine before",
        required="<= 0.75x / <= 1.00x",
        measured=f"{now / fsdp2:.3f}x / {now / then:.3f}x",
        is_met=now / fsdp2 <= 0.75 and now / then <= 1,
        note=(
            f"benchmarks/wire.toml, cache=host: {now:.3f} s, FSDP2 {fsdp2:.3f} s, before {then:.3f} s; medians of "
            f"{repeats} alternating runs each: now {_list(times['now'])}, before {_list(times['before'])}."
        ),
    )


def reserved(out: Path, *, quick: bool = False) -> Row:
    """Peak memory of full training against FSDP2's, on a dense model and on one with fused experts."""
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
            "step; "
            f"{'; '.join(each)} (the dense model: host "
            f"{ratios['wire.toml']['host']:.3f}x, none {ratios['wire.toml']['none']:.3f}x)."
        ),
    )


def _comparison(job: str, out: Path) -> Comparison:
    return Comparison(load(_HERE / job), out, nodes=_NODES, local=_LOCAL, reporter=make_reporter())


def _run(lab: Comparison, strategy: str, repeat: int) -> Result:
    return lab.run(Case(strategy=strategy, steps=_STEPS, measure_memory=False, log_every=100, repeat=repeat))


def _peak(result: Result) -> float:
    return result.allocated_peak_bytes or math.nan


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) + " s"


@contextmanager
def _source_before(out: Path) -> Iterator[Path]:
    """A checkout of the tree before: [Note: The engine before]."""
    added = _git("log", "--diff-filter=A", "--format=%H", "-1", "--", BEFORE_FILE)
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
    """Let started processes import laconic from `source`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(source)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _jobs_without_defaults() -> Iterator[None]:
    """Leave out of job files what is at its default: the tree before knows no keys that came later."""
    known = _lines(to_toml(Config()))

    def short(config: Config) -> str:
        sections: dict[str, list[str]] = {}
        for section, line in _lines(to_toml(config)) - known:
            sections.setdefault(section, []).append(line)
        return "\n".join(f"[{section}]\n" + "\n".join(sorted(lines)) for section, lines in sections.items())

    runner.to_toml = short  # type: ignore[attr-defined]
    try:
        yield
    finally:
        runner.to_toml = to_toml  # type: ignore[attr-defined]


def _lines(text: str) -> set[tuple[str, str]]:
    """(section, line) of every line of a job file."""
    found, section = set(), ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        else:
            found.add((section, line))
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_REPOSITORY), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
