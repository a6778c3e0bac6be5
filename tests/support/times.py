"""What the suite costs: seconds of the clock and of the processors by file, printed at the end of a run.

The processors' seconds count all processes that a file starts, ranks too. They hardly depend on what else the machine
does, so a change of them is a change of the tests.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NUM_FILES = 10

_costs: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
"""Seconds of the clock and of the processors by file, of this process or of all workers."""
_clock_s, _cpu_s = time.perf_counter(), 0.0
"""Both clocks when the present file began."""


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


def pytest_collection_finish() -> None:
    """Count from here: what imports and the collection cost belongs to no file."""
    global _clock_s, _cpu_s
    _clock_s, _cpu_s = time.perf_counter(), processors_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Book the costs of a file after its last test."""
    global _clock_s, _cpu_s
    result = yield
    if nextitem is None or nextitem.path != item.path:
        clock_s, cpu_s = time.perf_counter(), processors_s()
        cost = _costs[item.nodeid.partition("::")[0]]
        cost[0] += clock_s - _clock_s
        cost[1] += cpu_s - _cpu_s
        _clock_s, _cpu_s = clock_s, cpu_s
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's costs to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = dict(_costs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's costs."""
    for file, (clock_s, cpu_s) in getattr(node, "workeroutput", {}).get("costs", {}).items():
        _costs[file][0] += clock_s
        _costs[file][1] += cpu_s


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the slowest files and the sum of all."""
    slowest = sorted(_costs.items(), key=lambda each: -each[1][0])
    shown = slowest if terminalreporter.config.option.durations == 0 else slowest[:_NUM_FILES]
    if len(slowest) < 2:
        return
    terminalreporter.section(f"slowest {len(shown)} files")
    for file, (clock_s, cpu_s) in shown:
        terminalreporter.line(f"{clock_s:8.2f}s {cpu_s:8.2f}s of the processors  {file}")
    clock_s, cpu_s = (sum(column) for column in zip(*_costs.values(), strict=True))
    terminalreporter.line(f"{clock_s:8.2f}s {cpu_s:8.2f}s of the processors  all {len(slowest)} files")
