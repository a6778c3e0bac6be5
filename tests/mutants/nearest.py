"""Which tests pass each line of laconic, and what each test costs: from coverage of one run of `make test`.

As a plugin of pytest (`-p tests.mutants.nearest`) this module records both in the folder that LACONIC_NEAREST names.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_ROOT = Path(__file__).parents[2]
_VARIABLE = "LACONIC_NEAREST"
_LINES, _COSTS = "lines.coverage", "costs.json"
UNLIMITED = ("-p", "no:cacheprovider", "-p", "no:tests.support.times")
"""pytest's arguments without the budgets of files: coverage and mutants take their time."""
_ALL = "(machine or heavy) and not campaign and not cuda"
"""What `make test-all` runs, as pytest's `-m` says it."""


class _Recorder:
    """Records the lines of each test, under the test's name, and its seconds of this thread's processor.

    A test that fails is left out, or it would kill each mutant. Until Python 3.12 one may fail for the recording alone:
    two threads that begin at once cannot both have coverage's trace function.
    """

    def __init__(self, folder: Path) -> None:
        self._costs_file = folder / _COSTS
        self._costs: dict[str, float] = {}
        self._failed: set[str] = set()
        self._coverage = coverage.Coverage(
            data_file=folder / _LINES, source=[str(_ROOT / "src" / "laconic")], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        begun_s = time.process_time()
        try:
            return (yield)
        finally:
            self._costs[item.nodeid] = time.process_time() - begun_s
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        costs = {name: cost_s for name, cost_s in self._costs.items() if name not in self._failed}
        self._costs_file.write_text(json.dumps(costs), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record, if a folder is named."""
    if _VARIABLE in os.environ:
        config.pluginmanager.register(_Recorder(Path(os.environ[_VARIABLE])))


def record(folder: Path) -> None:
    """Run what `make test` runs, and record it in `folder`.

    Raises:
        RuntimeError: pytest has not come to its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_LINES, _COSTS):
        (folder / name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *UNLIMITED, "-p", "tests.mutants.nearest"]
    status = subprocess.run(command, cwd=_ROOT, env={**os.environ, _VARIABLE: str(folder)}, check=False).returncode
    if status > 1:
        raise RuntimeError(f"pytest ended with status {status}")


def is_recorded(folder: Path) -> bool:
    """True if `record` has come to its end there."""
    return (folder / _COSTS).exists()


class Nearest:
    """The tests that `record` has found at each line."""

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(folder / _LINES)
        self._data.read()
        self._costs: dict[str, float] = json.loads((folder / _COSTS).read_text(encoding="utf-8"))

    def inside(self, module: str, line: int) -> list[str]:
        """The tests of `make test` that pass a line of a module, the cheapest first.

        No test passes a line on its own that belongs to a longer statement: then those of the line before it in its
        function do. Of what runs at the import, or is compiled, coverage tells nothing: then those of the whole module
        do, or those of the modules that name it.
        """
        functions = _functions(self._path(module))
        before = next((range(line, body.start - 1, -1) for body in functions if line in body), range(0))
        contexts = self._contexts(module)
        names = next((found for number in before if (found := contexts.get(number, set()))), set())
        names = names or set().union(*contexts.values()) or set().union(*self._of_those_that_name(module))
        return sorted(names, key=lambda name: (self._costs[name], name))

    def _contexts(self, module: str) -> dict[int, set[str]]:
        """The tests that pass each line of the module's functions."""
        functions = _functions(self._path(module))
        lines = self._data.contexts_by_lineno(self._path(module))
        inner = {
            number: self._known(found) for number, found in lines.items() if any(number in body for body in functions)
        }
        return {number: found for number, found in inner.items() if found}

    def _of_those_that_name(self, module: str) -> Iterator[set[str]]:
        name = re.compile(rf"\b{module.rpartition('/')[2]}\b")
        source = _ROOT / "src" / "laconic"
        for file in sorted(source.rglob("*.py")):
            other = str(file.relative_to(source).with_suffix(""))
            if other != module and name.search(file.read_text("utf-8")):
                yield from self._contexts(other).values()

    def outside(self, module: str) -> list[str]:
        """The arguments that make pytest run the other tests near a module.

        They are those of its room, and of files that pass it; those of kernels, too, which run in processes apart.
        """
        lines = self._data.contexts_by_lineno(self._path(module))
        files = {name.partition("::")[0] for found in lines.values() for name in self._known(found)}
        room = _ROOT / "tests" / module.partition("/")[0]
        files |= {"tests/kernels/test_kernels.py"} if module.endswith("_triton") else set()
        rest = sorted(files - {str(file.relative_to(_ROOT)) for file in room.rglob("*.py")})
        return ["-m", _ALL, *([str(room.relative_to(_ROOT))] if room.is_dir() else []), *rest]

    def _path(self, module: str) -> str:
        return str(_ROOT / "src" / "laconic" / f"{module}.py")

    def _known(self, names: list[str]) -> set[str]:
        return {name for name in names if name in self._costs}


@functools.cache
def _functions(path: str) -> list[range]:
    """The lines of the bodies of functions, the inner ones before those around them."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = (range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1) for node in found)
    return sorted(bodies, key=len)
