"""The flakes of the project's own suite, and the time of its CI.

python -m benchmarks.suite                            all rows, some hours; the machine should be idle
python -m benchmarks.suite --rows ci                  half an hour
python -m benchmarks.suite --quick                    few repetitions, printed only
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.measure import Benchmark
from tests.support.record import Row

_ROOT = Path(__file__).parents[1]
_COUNTS = re.compile(r"=+ (.*) in ([\d.]+)s")
_STEPS = re.compile(r"make (\S+) took (\d+) s")
_WORKERS = 2


BENCHMARK = Benchmark(name="suite", measures=("laconic.rehearse",), prepare=lambda options: options.quick)


@dataclass(frozen=True)
class _Run:
    """One run of a part of the suite."""

    words: str
    """pytest's own count."""
    clock_s: float
    has_failed: bool
    commit: str


def _run(target: str, *prefix: str) -> _Run:
    done = subprocess.run([*prefix, "make", target], cwd=_ROOT, capture_output=True, text=True)
    counts = _COUNTS.findall(done.stdout)
    if not counts:
        raise RuntimeError(f"make {target} ran no test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode:
        (_ROOT / "runs").mkdir(exist_ok=True)
        (_ROOT / "runs" / f"failed-{target}-{time.time():.0f}.txt").write_text(done.stdout, encoding="utf-8")
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([f"  make {target}: {counts[-1][0]} in {counts[-1][1]} s", *failures]), file=sys.stderr, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True).stdout
    return _Run(
        words=counts[-1][0],
        clock_s=float(counts[-1][1]),
        has_failed=done.returncode != 0,
        commit=commit.strip(),
    )


@contextlib.contextmanager
def _spinning(number: int) -> Iterator[None]:
    """Let so many processes take all of the processors that they can get."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _repeat(is_quick: bool, row: str, number: int, target: str, slots: Sequence[tuple[str, ...]]) -> list[_Run]:
    """Run a part of the suite so many times, at once in each slot: a command that runs another one, or none.

    Hours pass, so each run is kept in runs/ beside its row, and a call after a break goes on. A call that finds all of
    them begins anew.
    """
    if is_quick:
        with _spinning(_WORKERS * (len(slots) - 1)):
            return [_run(target, *slots[0])]
    kept = _ROOT / "runs" / f"suite-{row}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    runs = [_Run(**json.loads(line)) for line in kept.read_text("utf-8").splitlines()] if kept.exists() else []
    if len(runs) >= number:
        runs = []
        kept.unlink()
    numbers = iter(range(len(runs), number))
    are_done = threading.Event()

    def repeat(slot: tuple[str, ...]) -> None:
        try:
            for _ in numbers:
                runs.append(_run(target, *slot))
                with kept.open("a", encoding="utf-8") as file:
                    print(json.dumps(asdict(runs[-1])), file=file)
            if len(runs) < number:
                with _spinning(_WORKERS):  # the last runs have as much company as the first
                    are_done.wait()
        finally:
            are_done.set()

    with ThreadPoolExecutor(len(slots)) as threads:
        list(threads.map(repeat, slots))
    return runs


def _repeated(claim: str, runs: Sequence[_Run]) -> Row:
    failed, seconds = sum(run.has_failed for run in runs), [run.clock_s for run in runs]
    commits = ", ".join(dict.fromkeys(run.commit for run in runs))
    return Row(
        claim=claim,
        measured=f"{failed} of {len(runs)}",
        note=f"{runs[0].words}; {min(seconds):.0f} to {max(seconds):.0f} s a run. Sources: {commits}.",
    )


@BENCHMARK.row("test-busy")
def make_test_beside_others(is_quick: bool) -> Row:
    """`make test` beside the four processes of two other runs of it, which never wait: no second of a core is lost."""
    runs = _repeat(is_quick, "test-busy", 20, "test", [()] * 3)
    return _repeated("`make test` beside four processes that spin: those of two other runs of it", runs)


@BENCHMARK.row("test-one-core")
def make_test_on_one_core(is_quick: bool) -> Row:
    """`make test` where it has one core; another run of it has the other."""
    runs = _repeat(is_quick, "test-one-core", 5, "test", [("taskset", "-c", core) for core in "01"])
    return _repeated("`make test` on one core", runs)


@BENCHMARK.row("ci")
def continuous_integration(is_quick: bool) -> Row:
    """All of .ci/run in a fresh clone, with the installation."""
    with tempfile.TemporaryDirectory(prefix="laconic-ci-") as folder:
        clone = Path(folder, "laconic")
        subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(clone)], check=True)
        begun = time.perf_counter()
        done = subprocess.run(["bash", ".ci/run"], cwd=clone, capture_output=True, text=True)
        minutes = (time.perf_counter() - begun) / 60
    steps = ", ".join(" ".join(found) for found in _STEPS.findall(done.stdout))
    print(done.stdout[-4000:] if done.returncode else f"  {steps}", file=sys.stderr, flush=True)
    return Row(
        claim="all of .ci/run in a fresh clone, with the installation: minutes",
        measured=f"{minutes:.1f} min" + (", failed" if done.returncode else ""),
        note=f"Seconds: {steps}.",
    )


@BENCHMARK.row("test-all-busy")
def make_test_all_beside_others(is_quick: bool) -> Row:
    """`make test-all` beside another run of it: three workers, which wait for a third of their time."""
    runs = _repeat(is_quick, "test-all-busy", 5, "test-all", [()] * 2)
    return _repeated("`make test-all` beside two processes that spin: the workers of another run of it", runs)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
