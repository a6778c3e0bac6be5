"""The progress of a comparison on the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from laconic.compare import Case
from laconic.compare.progress import ConsoleReporter, TableReporter
from laconic.compare.table import ScreenTable
from tests.support.canned import canned_host

pytestmark = pytest.mark.machine

CASE = Case(strategy="host", rate_bits_per_s=200e6, steps=4)


def shown(*, terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    reporter = ConsoleReporter(console, num_runs=2)
    with reporter.running(CASE):
        for step in (1, 2):
            reporter.step(step, 2.5, 0.75)
    reporter.step(3, 2.5, 0.75)  # too late: there is no bar any more
    reporter.finished(CASE, canned_host())
    return text.getvalue()


def test_without_a_terminal_there_is_a_line_before_and_after() -> None:
    assert shown(terminal=False).splitlines() == [
        "[1/2] full training, laconic host, 200mbit: 4 steps ...",
        "[1/2] full training, laconic host, 200mbit: 2.800 s per step, 100.00 MB on the wire per node and step, "
        "loss 2.5000 (40 s in all)",
    ]


def test_a_table_has_a_row_after_each_run_and_nothing_before() -> None:
    text = io.StringIO()
    reporter = TableReporter(Console(file=text, width=120), ScreenTable(["laconic host"]), num_runs=1)
    with reporter.running(CASE):
        reporter.step(1, 2.5, 0.75)
    assert not text.getvalue()
    reporter.finished(CASE, canned_host())
    assert "laconic host    2.800" in text.getvalue().splitlines()[-1]


def test_on_a_terminal_a_bar_moves() -> None:
    text = shown(terminal=True)
    assert "2/4 loss 2.500, 0.75 s per step" in text
    assert "2.800 s per step, 100.00 MB" in text
