"""What the suite costs: seconds of the clock and of the processors by file, printed at the end of a run, and limited.

[Note: A file's share]
How much a processor does in a second hangs on the machine and on its neighbours, and no yardstick tells how much: a
neighbour slows memory down more than cores. What holds everywhere is the ratio of two files of one run. So a file may
cost five times as much as the files of its run do on average, and a run of a few files limits nothing. The sum of all
files is judged where the machine is known to be idle, by `python -m benchmarks.suite --rows test`.

The seconds count all processes that a file starts, ranks too. What a test imports first is booked to nobody, since
another test would import it otherwise. A neighbour may come while one file runs. So a file that seems to cost too much
is measured once more by itself, and fails if it costs too much again. Where processes wait for each other's processors,
caches are cold and seconds mean nothing. So nothing is limited in a file during which the kernel says that somebody
has waited for more than half of the time.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import _bootstrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.tiers import is_outside

_TIMES_THE_MEAN, _CALM = 5.0, 0.5
_MIN_FILES = 100
"""A mean of fewer files says nothing."""
_PRESSURE = Path("/proc/pressure/cpu")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NUM_FILES = 10
_LIMIT_S = "LACONIC_FILE_LIMIT_S"
"""The variable with the limit of a file that is measured by itself."""


@dataclass
class _Cost:
    """What a file has cost."""

    clock_s: float = 0.0
    processors_s: float = 0.0
    is_inside: bool = True
    """True if all its tests are those of `make test`, so that it is limited."""
    waited_s: float = 0.0
    """As `_Clocks.waited_s`."""
    is_excused: bool = False
    """True if the file has kept its limit by itself."""

    @property
    def is_calm(self) -> bool:
        """True if nobody took its processors: [Note: A file's share]."""
        return self.waited_s <= _CALM * self.clock_s


_costs: dict[str, _Cost] = defaultdict(_Cost)
"""The costs by file, of this process or of all workers."""


class _Clocks(NamedTuple):
    """All clocks at one instant."""

    clock_s: float
    processors_s: float
    imports_s: float
    waited_s: float
    """The time in which any process of the machine has waited for a processor."""

    @classmethod
    def now(cls) -> _Clocks:
        return cls(time.perf_counter(), processors_s(), _imports_s, _waited_s())


_begin: _Clocks
"""The clocks when the present file began."""
_imports_s, _is_importing = 0.0, False


def processors_s() -> float:
    """Return the seconds of the processors that this process and its descendants have used, dead ones too."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            numbers = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # ended since
            continue
        parents[stat.parent.name], used[stat.parent.name] = numbers[1], sum(map(int, numbers[11:15])) * _TICK_S
    own, total = {str(os.getpid())}, 0.0
    while own:
        total += sum(used[process] for process in own)
        own = {process for process, parent in parents.items() if parent in own}
    return total


def _waited_s() -> float:
    """As `_Clocks.waited_s`; 0 where the kernel does not say."""
    return int(_PRESSURE.read_text("utf-8").split("\n")[0].rpartition("total=")[2]) / 1e6 if _PRESSURE.exists() else 0.0


def _timed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that imports, and books the time of a module that is new and not a part of another import."""

    def load(name: str, *arguments: Any) -> Any:
        global _imports_s, _is_importing
        if _is_importing or name in sys.modules:
            return real(name, *arguments)
        _is_importing, begun_s = True, time.thread_time()
        try:
            return real(name, *arguments)
        finally:
            _is_importing = False
            _imports_s += time.thread_time() - begun_s

    return load


def pytest_collection_finish() -> None:
    """Count from here: what the collection costs belongs to no file."""
    global _begin
    _bootstrap._find_and_load = _timed(_bootstrap._find_and_load)  # type: ignore[attr-defined]
    _begin = _Clocks.now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Book the costs of a file after its last test."""
    global _begin
    result = yield
    cost = _costs[item.nodeid.partition("::")[0]]
    cost.is_inside &= not is_outside(item) and item.get_closest_marker("heavy") is None
    if nextitem is None or nextitem.path != item.path:
        clock_s, used_s, imports_s, waited_s = (end - begin for end, begin in zip(_Clocks.now(), _begin, strict=True))
        cost.clock_s += clock_s
        cost.waited_s += waited_s
        cost.processors_s += max(0.0, used_s - imports_s)
        _begin = _Clocks.now()
    return result


def _limit_s() -> float:
    """The seconds of the processors that a file of this run may cost."""
    if _LIMIT_S in os.environ:
        return float(os.environ[_LIMIT_S])
    costs = [cost.processors_s for cost in _costs.values() if cost.is_inside]
    return _TIMES_THE_MEAN * sum(costs) / len(costs) if len(costs) >= _MIN_FILES else math.inf


def _files_above() -> dict[str, float]:
    """The files that cost more than they may, and their seconds."""
    judged = {file: cost for file, cost in _costs.items() if cost.is_inside and cost.is_calm and not cost.is_excused}
    return {file: cost.processors_s for file, cost in judged.items() if cost.processors_s > _limit_s()}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's costs to the process that prints them; fail a run that costs more than it may."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = {file: vars(cost) for file, cost in _costs.items()}
        return
    if _LIMIT_S not in os.environ:
        for file in _files_above():
            _costs[file].is_excused = _is_within_alone(file, _limit_s())
    if _files_above() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_within_alone(file: str, limit_s: float) -> bool:
    """Run a file once more by itself. Returns whether it then passes, within the limit."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", file]
    environment = {**os.environ, _LIMIT_S: str(limit_s)}
    return not subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's costs."""
    for file, part in getattr(node, "workeroutput", {}).get("costs", {}).items():
        cost = _costs[file]
        cost.clock_s += part["clock_s"]
        cost.processors_s += part["processors_s"]
        cost.is_inside &= part["is_inside"]
        cost.waited_s += part["waited_s"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the slowest files, the sum of all, and what costs more than it may."""
    slowest = sorted(_costs.items(), key=lambda each: -each[1].clock_s)
    shown = slowest if terminalreporter.config.option.durations == 0 else slowest[:_NUM_FILES]
    if len(slowest) > 1:
        terminalreporter.section(f"slowest {len(shown)} files")
        for file, cost in shown:
            terminalreporter.line(f"{cost.clock_s:8.2f}s {cost.processors_s:8.2f}s of the processors  {file}")
        clock_s, used_s = (sum(getattr(each, of) for each in _costs.values()) for of in ("clock_s", "processors_s"))
        terminalreporter.line(f"{clock_s:8.2f}s {used_s:8.2f}s of the processors  all {len(slowest)} files")
    disturbed = sum(cost.is_inside and not cost.is_calm for cost in _costs.values())
    if disturbed:
        terminalreporter.line(f"{disturbed} files are not limited: others took the processors meanwhile")
    for file in (file for file, cost in _costs.items() if cost.is_excused):
        terminalreporter.line(f"{file} seemed to cost too much, and does not by itself")
    for file, cost_s in _files_above().items():
        terminalreporter.line(
            f"FAILED {file} takes {cost_s:.1f} s of the processors, and may take {_limit_s():.1f}: {_TIMES_THE_MEAN:g}"
            " times what a file of its run takes on average. Make its tests smaller"
        )
