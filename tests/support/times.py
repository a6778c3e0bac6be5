"""What the suite costs: seconds of the clock and of the processors by file, printed at the end of a run, and limited.

[Note: A second of the processors]
How much a processor does in a second hangs on what its neighbours do: here the same tests take half as long again
beside others. So a file's seconds are told in those of a yardstick, a piece of work that takes 5 ms on an idle core of
the machine where the budgets were made. It runs before and after each file, and after each second. What a test imports
first is booked to nobody, since another test would import it otherwise. The seconds count all processes that a file
starts, ranks too. A measurement still strays, so what fails is a file that takes half as long again as its budget, in
this run and once more by itself.

Where processes wait for each other's processors, caches are cold and seconds mean nothing. So a file has no budget
while the kernel says that somebody has waited for more than half of the time.
"""

from __future__ import annotations

import os
import statistics
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
import torch

from tests.support.tiers import is_outside

FILE_S, SUITE_S = 5.0, 480.0
"""The budgets of a file of `make test`, and of all of them together, in seconds of the processors."""
_STRAYS, _CALM = 1.5, 0.5
_PRESSURE = Path("/proc/pressure/cpu")
_YARDSTICK_S, _ROUNDS, _SAMPLE_S = 0.005, 200, 1.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NUM_FILES = 10
_ALONE = "LACONIC_MEASURED_ALONE"


@dataclass
class _Cost:
    """What a file has cost."""

    clock_s: float = 0.0
    processors_s: float = 0.0
    """In those of the yardstick."""
    is_inside: bool = True
    """True if all its tests are those of `make test`, so that it has a budget."""
    waited_s: float = 0.0
    """As `_Clocks.waited_s`."""
    is_excused: bool = False
    """True if the file has kept its budget by itself."""

    @property
    def is_calm(self) -> bool:
        """True if nobody took its processors: [Note: A second of the processors]."""
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
_yardstick_s: float
"""The clocks when the present file began, and the yardstick's time before it."""
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


def _yardstick() -> float:
    """Do the piece of work, a part in Python and a part in torch, some times; return its median time."""
    return statistics.median(_work() for _ in range(3))


def _work() -> float:
    begun_s, values = time.thread_time(), torch.zeros(64, 64)
    for number in range(_ROUNDS):
        values = torch.tanh(values @ values + number)
        sum(each * each for each in range(200))
    return time.thread_time() - begun_s


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
    global _begin, _yardstick_s
    _bootstrap._find_and_load = _timed(_bootstrap._find_and_load)  # type: ignore[attr-defined]
    _yardstick_s = _yardstick()
    _begin = _Clocks.now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Book the costs of a file after its last test, and before it when time has passed."""
    global _begin, _yardstick_s
    result = yield
    cost = _costs[item.nodeid.partition("::")[0]]
    cost.is_inside &= not is_outside(item) and item.get_closest_marker("heavy") is None
    ends = nextitem is None or nextitem.path != item.path
    if ends or time.perf_counter() - _begin.clock_s > _SAMPLE_S:
        clock_s, used_s, imports_s, waited_s = (end - begin for end, begin in zip(_Clocks.now(), _begin, strict=True))
        before_s, _yardstick_s = _yardstick_s, _yardstick()
        cost.clock_s += clock_s
        cost.waited_s += waited_s
        cost.processors_s += max(0.0, used_s - imports_s) * 2 * _YARDSTICK_S / (before_s + _yardstick_s)
        _begin = _Clocks.now()
    return result


def _files_above() -> dict[str, float]:
    """The files that cost more than they may, and their seconds."""
    judged = {file: cost for file, cost in _costs.items() if cost.is_inside and cost.is_calm and not cost.is_excused}
    return {file: cost.processors_s for file, cost in judged.items() if cost.processors_s > FILE_S * _STRAYS}


def _above() -> list[str]:
    """What costs more than it may, in words."""
    lines = [
        f"{file} takes {cost_s:.1f} s of the processors, and its budget is {FILE_S:g}: make its tests smaller"
        for file, cost_s in _files_above().items()
    ]
    all_s = sum(cost.processors_s for cost in _costs.values() if cost.is_inside)
    if all_s > SUITE_S * _STRAYS and all(cost.is_calm for cost in _costs.values()):
        lines.append(f"all files take {all_s:.0f} s of the processors; their budget is {SUITE_S:g}")
    return lines


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's costs to the process that prints them; fail a run that costs more than it may."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = {file: vars(cost) for file, cost in _costs.items()}
        return
    if _ALONE not in os.environ:
        for file in _files_above():
            _costs[file].is_excused = _is_within_alone(file)
    if _above() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_within_alone(file: str) -> bool:
    """Run a file once more by itself. Returns whether it then passes, within its budget."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", file]
    return not subprocess.run(command, env={**os.environ, _ALONE: "1"}, capture_output=True, check=False).returncode


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
        terminalreporter.line(f"{disturbed} files are not held to their budgets: others took the processors meanwhile")
    for file in (file for file, cost in _costs.items() if cost.is_excused):
        terminalreporter.line(f"{file} seemed to cost more than its budget, and keeps it by itself")
    for line in _above():
        terminalreporter.line(f"FAILED {line}")
