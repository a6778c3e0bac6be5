"""What benchmarks/layout.py computes about padding, and how it records rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _padding
import layout
import record


@pytest.fixture(scope="module")
def plans() -> _padding.Plans:
    return _padding.Plans(quick=True)


@pytest.mark.parametrize("row", [_padding.padding_1, _padding.padding_16, _padding.padding_coarse])
def test_every_padding_row_is_met_at_the_quick_sizes(row: object, plans: _padding.Plans) -> None:
    found = row(plans)  # type: ignore[operator]
    assert found.is_met, found.measured


def test_a_case_is_compared_with_one_bucket_and_with_the_better_rule(plans: _padding.Plans) -> None:
    case = plans.get("GPT-OSS-120B", 1024, 16)
    assert case.num_buckets == 2
    assert 100 * case.planned == pytest.approx(1.95, abs=0.01)
    assert 100 * case.one_bucket == pytest.approx(87.98, abs=0.01)
    assert 100 * case.others == pytest.approx(428.68, abs=0.01), "LCM; FSDP2 pads 694 %"
    assert case.plan_s > 0


def test_a_row_that_fails_says_so(plans: _padding.Plans) -> None:
    assert not _padding._padding(plans, num_rows=16, limit=0.001).is_met


def test_planning_time_counts_every_case(plans: _padding.Plans) -> None:
    found = _padding.planning_time(plans)
    assert f"all {2 * 4 * 6 + 4} plans" in found.note


def test_rows_are_recorded_beside_what_was_known(
    plans: _padding.Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "RESULTS.md"
    monkeypatch.setattr(record, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", ["layout.py"])
    table = [["GPT-OSS-120B", "8", "1 %", "1 %", "1 %", "1 %", "1 %", "1 %"]]
    engine = record.Row(key="step-time", claim="step time", required="<= 1", measured="0.9", is_met=True)
    padding = record.Row(key="padding-1", claim="padding", required="<= 2 %", measured="1 %", is_met=True)
    layout._record([padding], table)
    layout._record([engine], [])
    text = results.read_text()
    assert text.index("| padding ") < text.index("| step time ")
    assert "| GPT-OSS-120B |" in text, "the table of the first run stays"
    assert set(json.loads((tmp_path / "results" / "layout.json").read_text())["rows"]) == {"padding-1", "step-time"}
