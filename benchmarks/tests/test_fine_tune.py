"""benchmarks.fine_tune: its rows and its picture, from made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import fine_tune
from laconic.compare.case import Case
from laconic.compare.result import Result
from tests.support.canned import canned

pytestmark = pytest.mark.machine


class Runs:
    """Stands for the lab: the unshaped wire is a fifth faster, and FSDP2's last loss is another one."""

    def run(self, case: Case) -> Result:
        step_s = 2.0 if case.rate_bits_per_s is None else 2.5
        losses = (5.0, 4.0, 3.0 + 0.003 * (case.strategy == "fsdp2"))
        changes: dict[str, Any] = {"strategy": case.strategy, "rate_bits_per_s": case.rate_bits_per_s}
        return canned(**changes, job=case.job, step_s=step_s, step_times_s=(step_s, step_s), losses=losses)


def test_the_rows_and_the_picture(tmp_path: Path) -> None:
    runs: Any = Runs()
    bench = fine_tune.Bench(comparison=runs, steps=3)
    row = fine_tune.against_unshaped(bench)
    assert (row.measured, row.is_met) == ("1.250x", False)
    assert "FSDP2 2.500 s, 300 MB a step" in row.note
    row = fine_tune.losses(bench)
    assert (row.measured, row.is_met) == ("within 1.0e-03", False)
    fine_tune.draw(bench, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
