"""What the suite costs: seconds of the clock and of the processors by file, printed at the end of a run, and limited.

[Note: A file's share]
How much a processor does in a second hangs on the machine and on its neighbours, and no yardstick tells how much: a
neighbour slows memory down more than cores. What holds everywhere is the ratio of two files of one run, to a fifth or
so. So a file should cost at most five times as much as the files of its run do on average, it fails above seven times,
and a run of a few files limits nothing. The sum of all files is judged where the machine is known to be idle, by
`python -m benchmarks.suite --rows ci`.

The seconds of the processors are those of pytest's own process, in which the tests that are limited stay. What a test
imports first is booked to nobody, since another test would import it otherwise. A neighbour may come while one file
runs. So a file that seems to cost too much is measured once more by itself, and fails if it costs too much again.
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
from typing import Any

import pytest

from tests.support.tiers import is_outside

_TIMES_THE_MEAN = 7.0
_MIN_FILES = 100
"""A mean of fewer files says nothing."""
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
    is_excused: bool = False
    """True if the file has kept its limit by itself."""


_costs: dict[str, _Cost] = defaultdict(_Cost)
"""The costs by file, of this process or of all workers."""
_imports_s, _is_importing = 0.0, False


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
    """Book imports from here on."""
    _bootstrap._find_and_load = _timed(_bootstrap._find_and_load)  # type: ignore[attr-defined]


def _clocks() -> tuple[float, float]:
    """The seconds of the clock, and of the processors without imports."""
    return time.perf_counter(), time.process_time() - _imports_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Book the costs of a test."""
    clock_s, processors_s = _clocks()
    result = yield
    cost = _costs[item.nodeid.partition("::")[0]]
    cost.is_inside &= not is_outside(item) and item.get_closest_marker("heavy") is None
    cost.clock_s += _clocks()[0] - clock_s
    cost.processors_s += _clocks()[1] - processors_s
    return result


def _limit_s() -> float:
    """The seconds of the processors that a file of this run may cost."""
    if _LIMIT_S in os.environ:
        return float(os.environ[_LIMIT_S])
    costs = [cost.processors_s for cost in _costs.values() if cost.is_inside]
    return _TIMES_THE_MEAN * sum(costs) / len(costs) if len(costs) >= _MIN_FILES else math.inf


def _files_above() -> dict[str, float]:
    """The files that cost more than they may, and their seconds."""
    judged = {file: cost.processors_s for file, cost in _costs.items() if cost.is_inside and not cost.is_excused}
    return {file: cost_s for file, cost_s in judged.items() if cost_s > _limit_s()}


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the slowest files, the sum of all, and what costs more than it may."""
    slowest = sorted(_costs.items(), key=lambda each: -each[1].clock_s)
    shown = slowest if terminalreporter.config.option.durations == 0 else slowest[:_NUM_FILES]
    if len(slowest) > 1:
        terminalreporter.section(f"slowest {len(shown)} files")
        clock_s, used_s = (sum(getattr(each, of) for each in _costs.values()) for of in ("clock_s", "processors_s"))
        for file, cost in (*shown, (f"all {len(slowest)} files", _Cost(clock_s, used_s))):
            terminalreporter.line(f"{cost.clock_s:8.2f}s {cost.processors_s:8.2f}s of the processors  {file}")
    for file in (file for file, cost in _costs.items() if cost.is_excused):
        terminalreporter.line(f"{file} seemed to cost too much, and does not by itself")
    for file, cost_s in _files_above().items():
        terminalreporter.line(
            f"FAILED {file} takes {cost_s:.1f} s of the processors, and may take {_limit_s():.1f}: {_TIMES_THE_MEAN:g}"
            " times what a file of its run takes on average. Make its tests smaller"
        )
