"""Everything that one machine with a GPU can say about laconic, and a report that anybody can send.

    python -m benchmarks.gpu.report             on a GPU: the CUDA tests, then all rows, recorded
    python -m benchmarks.gpu.report --quick     toy sizes, printed only; on CPU where there is no GPU

It needs torch, numpy and pytest alone, and runs from `src`: `make gpu`. A call ends after `--minutes`; another one goes
on with the rows that are left. On a machine with several GPUs the rows of benchmarks.gpu.several follow. It writes
DIR/report.md: the machine, the tests, the rows, and what failed with its log.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.__main__ import BENCHMARK
from laconic.compare.machine import describe_machine
from tests.support import targets
from tests.support.imported import collected
from tests.support.measure import BenchmarkError, Options
from tests.support.record import Row, is_old, keeps_its_target, recorded_rows, rows_table

ORDER = (
    "policies", "lossless-equal", "loss-none", "loss-host", "loss-device", "step-plain", "step-fsdp2", "overlap-alone",
    "offload", "codecs", "lossless", "pinned", "adamw8bit", "host-none", "host-host", "host-4bit", "memory-host",
    "memory-device", "memory-fsdp2", "publish-memory", "publish-standstill", "overlap-gloo",
)  # fmt: skip
"""The rows, in order of worth: first whether the numbers are right, then the time of a step."""
_SECTION = BENCHMARK.name
_COUNTS = ("policies", "lossless-equal")
"""The rows that say how many policies have the right numbers, of so many."""
_TESTS = (
    "tests/codec/test_cuda.py", "tests/codec/test_sparse.py", "tests/layers/test_scaled.py",
    "tests/optim/test_adamw8bit.py", "tests/shard/test_cuda.py", "tests/checkpoint/test_cuda.py",
    "tests/publish/test_cuda.py",
)  # fmt: skip
_TESTS_S = 400.0
_QUICK_RANKS = 4
"""The ranks on CPU for the rows of several GPUs, with `--quick`."""


@dataclass(kw_only=True)
class Report:
    """The answers of a machine so far."""

    facts: dict[str, Any]
    tests: str = "not run"
    """The last line of pytest, or why there is none."""
    tests_log: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """The traceback of each row that failed."""
    left: list[str] = field(default_factory=list)
    """The rows for which there was no time."""
    several: str = ""
    """What benchmarks.gpu.several printed, on a machine with several GPUs."""

    @property
    def is_sound(self) -> bool:
        """True if no test failed, and every row about numbers is right."""
        counts = [targets.numbers_of(self.rows[key].measured) for key in _COUNTS if key in self.rows]
        losses = [row for key, row in self.rows.items() if key.startswith("loss-")]
        is_right = all(good == tried for good, tried in counts) and all(
            keeps_its_target(_SECTION, row) for row in losses
        )
        return is_right and not self.failures and not self.has_failed_tests

    @property
    def has_failed_tests(self) -> bool:
        """True if a test failed, or could not run."""
        return "failed" in self.tests or "error" in self.tests

    def verdict(self) -> list[str]:
        """Three lines: whether laconic is sound here, how fast it is, and what falls short."""
        sound = "laconic is sound on this machine" if self.is_sound else "laconic is NOT sound on this machine"
        step = [f"{row.claim}: {row.measured}" for key, row in self.rows.items() if key.startswith("step")]
        unmet = [row for row in self.rows.values() if not keeps_its_target(_SECTION, row)]
        short = [f"{row.claim} ({row.measured}, target {targets.of(_SECTION, row.key)})" for row in unmet]
        short += [f"{key} failed" for key in self.failures]
        return [
            f"{sound}: CUDA tests: {self.tests}.",
            f"{'; '.join(step) or 'the step was not measured'}.",
            f"Falls short: {'; '.join(short) or 'nothing'}." + (f" Left: {', '.join(self.left)}." if self.left else ""),
        ]

    def markdown(self) -> str:
        """The whole report."""
        listed = "\n".join(f"- {key}: {value}" for key, value in self.facts.items())
        rows = rows_table({(_SECTION, key): row for key, row in self.rows.items()})
        parts = ["# laconic on a GPU", *self.verdict(), listed, rows]
        parts += [self.several] if self.several else []
        for key, log in ({"CUDA tests": self.tests_log} if self.has_failed_tests else {}) | self.failures.items():
            parts += [f"## {key}", f"```\n{log.strip()}\n```"]
        return "\n\n".join(parts) + "\n"


def facts() -> dict[str, Any]:
    """The machine and its software."""
    found: dict[str, Any] = {"gpu": "none: toy sizes on CPU", **describe_machine()}
    if torch.cuda.is_available():
        found["gpu memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    for name in ("triton", "numpy", "pytest"):
        found[name] = version(name) if find_spec(name) else "not installed"
    return found


def run_tests(report: Report) -> None:
    """Run the CUDA tests, several at a time where pytest-xdist is there."""
    many = ["-n", "4", "-p", "no:cacheprovider"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", *many, *_TESTS]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TESTS_S, check=False)
        report.tests_log = run.stdout + run.stderr
    except subprocess.TimeoutExpired as error:
        report.tests, report.tests_log = f"failed: no end after {_TESTS_S:.0f} s", str(error.stdout)
        return
    told = re.findall(r"^.*(?:passed|failed|error|skipped).*$", report.tests_log, flags=re.MULTILINE)
    report.tests = told[-1].strip("= ") if told else f"failed: pytest ended with {run.returncode}"


def measure(report: Report, options: Options, ends: Callable[[], bool], imported: Callable[[], set[str]]) -> None:
    """Measure the rows that are left, record each at once, and stop when the time is over."""
    bench = BENCHMARK.prepare(options)
    for key in ORDER:
        if key in report.rows:
            continue
        if ends():
            report.left.append(key)
            continue
        print(f"{key} ...", file=sys.stderr, flush=True)
        try:
            row = report.rows[key] = BENCHMARK.rows[key](bench)
        except Exception:  # of any kind: the other rows go on, and the report has it
            report.failures[key] = traceback.format_exc()
            continue
        if not options.quick:
            BENCHMARK.save(BENCHMARK.record(_SECTION, [row], ["--rows", key], imported()), bench)


def measure_several(report: Report, options: Options, seconds: float) -> None:
    """Run the rows of several GPUs, one rank each, if there are some; with `--quick` on CPU, too."""
    num_ranks = torch.cuda.device_count() or (_QUICK_RANKS if options.quick else 0)
    if num_ranks < 2:
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "benchmarks.gpu.several", *["--quick"] * options.quick]
    print(f"several: {num_ranks} ranks ...", file=sys.stderr, flush=True)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 60.0), check=False)
    except subprocess.TimeoutExpired as error:
        report.failures["several"] = f"no end after {error.timeout:.0f} s\n{error.stderr}"
        return
    report.several = run.stdout
    if run.returncode:
        report.failures["several"] = run.stdout + run.stderr


def of_today() -> dict[str, Row]:
    """The rows that this code gave today."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        key: row
        for (section, key), row in recorded_rows().items()
        if section == _SECTION and key in ORDER and row.date == today and not is_old(row)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all of it; returns 1 if laconic is not sound here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes; record nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: runs/gpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no row after so many; default: 8")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given, namespace=Options())
    end_s = time.monotonic() + 60 * options.minutes
    report = Report(facts=facts(), rows={} if options.quick else of_today())
    try:
        if torch.cuda.is_available():
            run_tests(report)
        else:
            report.tests = "not run, as there is no GPU"
        with collected() as imported:
            measure(report, options, lambda: time.monotonic() > end_s, imported)
        measure_several(report, options, end_s - time.monotonic())
    except BenchmarkError as error:
        print(f"benchmarks.gpu.report: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(report.markdown(), encoding="utf-8")
    print("\n".join([*report.verdict(), f"The report to send: {options.out / 'report.md'}"]))
    return 0 if report.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
