"""The checks by which the rows of benchmarks.start judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.start import demo, launch
from tests.support import record
from tests.support.launch_files import FILES
from tests.support.measure import Options

pytestmark = pytest.mark.machine

AS_IN_WIRE = {"fsdp2": (1.0, 1.0), "hsdp": (0.551, 0.444), "ddp": (0.674, 0.666), "host": (0.458, 0.444)}
"""The seconds and the bytes of each strategy, of FSDP2's."""


def results(**changed: tuple[float, float]) -> list[dict[str, Any]]:
    figures = AS_IN_WIRE | {"4bit": (0.2, 0.06)} | changed
    return [
        {"job": "full", "strategy": name, "step_s": 2 * seconds, "wire_bytes": 4e7 * nbytes}
        for name, (seconds, nbytes) in figures.items()
    ]


IN_TIME = {"first row": 10.0, "first table": 50.0, "all": 100.0}


@pytest.mark.parametrize(
    ("times_s", "found", "is_met"),
    [
        (IN_TIME, results(), True),
        (IN_TIME, results(host=(0.48, 0.444)), True),
        (IN_TIME, results(host=(0.60, 0.444)), False),
        (IN_TIME, results(hsdp=(0.551, 0.60)), False),
        ({**IN_TIME, "first table": 61.0}, results(), False),
    ],
)
def test_the_demo_is_in_time_and_its_ratios_are_those_on_record(
    monkeypatch: pytest.MonkeyPatch, times_s: dict[str, float], found: list[dict[str, Any]], is_met: bool
) -> None:
    monkeypatch.setattr(demo, "_run", lambda options: (times_s, found))
    row = demo.row(Options(quick=False, out=Path()))
    assert row.is_met is is_met, row
    assert "of 6 ratios" in row.measured


def test_every_launch_example_has_a_check() -> None:
    assert set(launch.CHECKS) == set(FILES)


def test_rows_that_other_commands_measure_stay_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutants are measured by tests.mutants, and their row stands in the section of benchmarks.start."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "RESULTS.md")
    for key, module in (("demo", "benchmarks.start"), ("mutants", "tests.mutants")):
        row = record.Row(key=key, claim=f"the claim of {key}", required="1", measured="1", is_met=True)
        record.Record("start", [row], [key], [], module=module).save()
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.index("the claim of mutants") < text.index("the claim of demo")
    assert "`python -m benchmarks.start`" in text
    assert "`python -m tests.mutants`" in text
