"""Mutants of the critical code: does a test notice each small change of meaning?

    python -m tests.mutants --record                    all rooms, recorded
    python -m tests.mutants --rooms codec,store         some rooms, printed only
    python -m tests.mutants --matching "first_tensor"   the mutants whose names have this, all of them
    python -m tests.mutants --inside                    do not try survivors on the tests of `make test-all`

A seed draws a sample of each room. For every mutant a fork of this process, which has imported torch but not laconic,
imports the changed module and runs the tests of `make test` that pass the changed line (nearest.py), the cheapest
first. The first failure kills the mutant. One that survives without a reason meets the near tests of `make test-all`.
The file `--out` keeps the verdicts, so that a run can go on after a break. A survivor needs a test, or a reason in
`EXPLAINED` or `MISSED`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import multiprocessing.context
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.explained import EXPLAINED, MISSED
from tests.mutants.mutation import Mutant, mutants
from tests.mutants.nearest import UNLIMITED, Nearest, is_recorded, record
from tests.support import launch

_ROOT = Path(__file__).parents[2]
_SHARES = {
    "codec": 22, "layers": 8, "layout": 25, "store": 15, "islands": 25, "cyclic": 35, "shard": 40, "publish": 30,
    "comm": 20, "ragged": 15, "checkpoint": 15, "guard": 10, "partial": 10, "optim": 20,
}  # fmt: skip
"""The mutants that are drawn of each room."""
_AT_LEAST = {"inside": 95, "all": 97}
"""Percent of the mutants that change something: killed by `make test`, and with `make test-all`."""
_TEST_S, _MUTANT_S = 60, 1500
"""Seconds of one test, and of all tests of one mutant."""
_UNCOLLECTED = "a test that is not there"
"""The killer where a mutant takes a test away: a file cannot be imported, or its cases have other names."""


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What the tests found about a mutant."""

    killer: str
    """The test that failed, "time" if the tests did not end, or "" if all passed."""
    is_inside: bool
    """True if it was a test of `make test`."""


class _Slot:
    """A copy of the sources, in which one mutant lives at a time; the working tree may change meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._copy, self._log, self._arguments = folder / "copy", folder / "log", folder / "arguments"
        shutil.copytree(_ROOT, self._copy, ignore=_not_of_the_sources)

    def judge(self, mutant: Mutant, nearest: Nearest, *, first: str, goes_outside: bool) -> _Verdict:
        """Run the nearest tests with a mutant, the one named `first` before the others."""
        path = self._copy / "src" / "laconic" / f"{mutant.module}.py"
        original = path.read_text("utf-8")
        path.write_text(mutant.code, encoding="utf-8")
        try:
            inside = sorted(nearest.inside(mutant.module, mutant.line), key=lambda test: test != first)
            killer = self._killer(["-m", "", *inside]) if inside else ""
            if killer == _UNCOLLECTED:
                path.write_text(original, encoding="utf-8")
                if self._killer(["-m", "", "--collect-only", *inside]):
                    raise RuntimeError("the map names tests that are not there any more: make it anew with --renew")
            if killer or not goes_outside or mutant.key in EXPLAINED | MISSED:
                return _Verdict(killer=killer, is_inside=True)
            killer = self._killer_outside(nearest.outside(mutant.module))
        finally:
            path.write_text(original, encoding="utf-8")
        if "::" in killer and self._killer(["-m", "", killer]):
            raise RuntimeError(f"{killer} fails without a mutant, too")
        return _Verdict(killer=killer, is_inside=False)

    def _killer_outside(self, tests: list[str]) -> str:
        """The first test that fails by itself, too: one that fails beside others alone may have been late for them."""
        while "::" in (killer := self._killer(tests)) and not self._killer(["-m", "", killer]):
            print(f"{killer} fails beside others, and passes alone", flush=True)
            tests = [*tests, f"--deselect={killer}"]
        return killer

    def _killer(self, tests: list[str]) -> str:
        self._arguments.write_text("\n".join(tests), encoding="utf-8")
        child = os.fork()
        if child == 0:
            _run_tests(self._arguments, self._copy, self._log)
        return _verdict(child, self._log)


def main() -> int:
    """Run the mutants that the command line names; return 1 if one survives without a reason."""
    options = _options()
    if options.renew or not is_recorded(options.nearest):
        record(options.nearest)
    chosen = _sample(options.rooms.split(","), options.seed, options.matching)
    known = {
        key: verdict
        for key, verdict in _known(options.out).items()
        # the others have not met `make test-all` yet
        if verdict.killer or options.inside or not verdict.is_inside or key in EXPLAINED | MISSED
    }
    _import_once()
    unknown = [mutant for mutant in chosen if mutant.key not in known]
    shares = [unknown[start :: options.jobs] for start in range(options.jobs)]
    judges = [child for share in shares if (child := _fork(share, options))]
    failed = [child for child in judges if os.waitpid(child, 0)[1]]
    if failed:
        print(f"{len(failed)} of {len(judges)} judges ended with an error", file=sys.stderr)
        return 1
    return _report(chosen, _known(options.out), options)


def _fork(mutants_of_it: list[Mutant], options: argparse.Namespace) -> int:
    """Judge mutants in a fork of this process, one after another, and return the fork's number."""
    if not mutants_of_it or (child := os.fork()):
        return child if mutants_of_it else 0
    status = 1
    try:
        with tempfile.TemporaryDirectory(prefix="laconic-mutants-") as folder:
            slot, nearest, before = _Slot(Path(folder)), Nearest(options.nearest), _known(options.before)
            for number, mutant in enumerate(mutants_of_it, 1):
                begin_s = time.monotonic()
                first = before[mutant.key].killer if mutant.key in before else ""
                verdict = slot.judge(mutant, nearest, first=first, goes_outside=not options.inside)
                with options.out.open("a", encoding="utf-8") as file:
                    print(json.dumps([mutant.key, dataclasses.asdict(verdict)]), file=file)
                taken = f"{number}/{len(mutants_of_it)} {time.monotonic() - begin_s:4.0f}s"
                print(f"{taken} {mutant.key}: {verdict.killer or 'SURVIVED'}", flush=True)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", default=",".join(_SHARES), metavar="A,B,...", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matching", default="", metavar="TEXT", help="all mutants with this in their names")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to judge at once")
    parser.add_argument("--inside", action="store_true", help="run the tests of `make test` only")
    parser.add_argument("--renew", action="store_true", help="find the nearest tests again")
    parser.add_argument("--nearest", type=Path, default=_ROOT / "runs" / "nearest", help="keep the nearest tests here")
    parser.add_argument("--out", type=Path, default=_ROOT / "runs" / "mutants.jsonl", help="keep what is found here")
    parser.add_argument(
        "--before",
        type=Path,
        default=_ROOT / "runs" / "before.jsonl",
        help="an --out of old sources: its killers go first",
    )
    parser.add_argument("--record", action="store_true", help="record the rows")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def _sample(rooms: list[str], seed: int, matching: str) -> list[Mutant]:
    """Draw the mutants of each room, no two in one line: they change one decision."""
    chosen = []
    for room in rooms:
        files = sorted((_ROOT / "src" / "laconic" / room).glob("*.py"))
        found = [mutant for file in files for mutant in mutants(f"{room}/{file.stem}", _source(f"{room}/{file.stem}"))]
        if matching:
            chosen += [mutant for mutant in found if matching in mutant.key]
            continue
        random.Random(f"{seed} {room}").shuffle(found)
        lines = {(mutant.module, mutant.line): mutant for mutant in reversed(found)}
        chosen += list(reversed(lines.values()))[: _SHARES[room]]
    return chosen


def _source(module: str) -> str:
    return (_ROOT / "src" / "laconic" / f"{module}.py").read_text("utf-8")


def _known(out: Path) -> dict[str, _Verdict]:
    lines = out.read_text("utf-8").splitlines() if out.exists() else []
    return {key: _Verdict(**verdict) for key, verdict in map(json.loads, lines)}


def _import_once() -> None:
    """Import what every fork needs, but nothing of laconic; see [Note: Fork server] in launch.py."""
    for module in launch.PRELOADED:
        if not module.startswith("laconic"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _not_of_the_sources(folder: str, names: list[str]) -> set[str]:
    """The names that are not copied. Hidden files below the root are the sources', such as those of old checkpoints."""
    at_root = {name for name in names if name.startswith(".") or name in ("runs", "build")}
    return {"__pycache__", *(at_root if Path(folder) == _ROOT else ())}


class _Rank(multiprocessing.context.ForkProcess):
    """A fork without garbage: a process group in it would wait, when it is collected, for threads that no fork has."""

    def start(self) -> None:
        gc.collect()
        super().start()


class _Context(multiprocessing.context.ForkContext):
    Process = _Rank


def _run_tests(arguments: Path, copy: Path, log: Path) -> None:
    """Run tests of the copy in this fork, and end. Ranks that are processes are forks of this one."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = [str(copy), str(copy / "src")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    importlib.import_module("tests.support.launch").context = _Context()  # type: ignore[attr-defined]
    pytest = importlib.import_module("pytest")
    status = 3
    try:
        status = pytest.main(["-x", "-q", "-rfE", *UNLIMITED, f"--timeout={_TEST_S}", f"@{arguments}"])
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def _verdict(child: int, log: Path) -> str:
    deadline = time.monotonic() + _MUTANT_S
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return "time"
    if os.waitstatus_to_exitcode(status) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    if os.waitstatus_to_exitcode(status) == pytest.ExitCode.USAGE_ERROR:
        return _UNCOLLECTED
    text = log.read_text("utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    return failed[0] if failed else f"exit status {os.waitstatus_to_exitcode(status)}"


def _report(chosen: list[Mutant], known: dict[str, _Verdict], options: argparse.Namespace) -> int:
    survivors = [mutant.key for mutant in chosen if not known[mutant.key].killer]
    unexplained = [key for key in survivors if key not in EXPLAINED | MISSED]
    inside = sum(bool(known[mutant.key].killer) and known[mutant.key].is_inside for mutant in chosen)
    equal, killed = sum(key in EXPLAINED for key in survivors), len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} killed, {inside} by `make test`; {len(unexplained)} survive without a reason")
    for key in survivors:
        print(f"  {key}: {(EXPLAINED | MISSED).get(key, 'NO REASON')}")
    if options.record:
        from tests.support.record import Record, Row

        changing = max(1, len(chosen) - equal)
        by_time = sum(verdict.killer == "time" for verdict in known.values())
        note = (
            f"{', '.join(f'{room} {share}' for room, share in _SHARES.items())}. A test that names no limit fails after"
            f" {_TEST_S} s; {by_time} mutants were killed by the limit of all their tests. Of the survivors {equal}"
            f" change no result, and {len(survivors) - equal - len(unexplained)} change what no test shows: see"
            " tests/mutants/explained.py."
        )
        rows = [
            Row(
                key=f"mutants-{tier}",
                claim=f"mutants that change a result, killed by `make {words}",
                measured=f"{number} of {changing}, {100 * number / changing:.1f} %; {len(unexplained)} unexplained",
                note=note if tier == "inside" else "",
            )
            for tier, words, number in (
                ("inside", "test` alone", inside),
                ("all", "test` and `make test-all`", killed),
            )
        ]  # fmt: skip
        rooms = [f"laconic.{room}" for room in _SHARES]
        keys = [row.key for row in rows]
        Record("suite", rows, keys, sys.argv[1:], module="tests.mutants", measures=rooms, imported=rooms).save()
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
