"""benchmarks.layout: the computation of padding, and the record of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import layout
from benchmarks.layout import Bench
from tests.support import record
from tests.support.record import Record, Row

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Path(), quick=True)


@pytest.mark.parametrize("row", [layout.padding_1, layout.padding_16, layout.padding_coarse])
def test_every_padding_row_is_met_at_the_quick_sizes(row: Callable[[Bench], Row], bench: Bench) -> None:
    found = row(bench)
    assert found.is_met, found.measured


def test_a_case_is_compared_with_one_bucket_and_with_the_better_rule(bench: Bench) -> None:
    case = bench.get("GPT-OSS-120B", 1024, 16)
    assert case.num_buckets == 2
    assert 100 * case.planned == pytest.approx(1.95, abs=0.01)
    assert 100 * case.one_bucket == pytest.approx(87.98, abs=0.01)
    assert 100 * case.other_rules == pytest.approx(428.68, abs=0.01), "LCM; FSDP2 pads 694 %"
    assert case.plan_s > 0


def test_a_row_that_fails_says_so(bench: Bench) -> None:
    assert not layout.padding_row(bench, num_rows=16, limit=0.001).is_met


def test_planning_time_counts_every_case(bench: Bench) -> None:
    found = layout.planning_time(bench)
    assert f"all {2 * 4 * 6 + 4} plans" in found.note


def test_a_table_with_gaps_does_not_replace_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "RESULTS.md"
    monkeypatch.setattr(record, "RESULTS", results)
    table = [["GPT-OSS-120B", "8", "1 %", "1 %", "1 %", "1 %", "1 %", "1 %"]]
    engine_row = Row(key="step-time", claim="step time", required="<= 1", measured="0.9", is_met=True)
    padding_row = Row(key="padding-1", claim="padding", required="<= 2 %", measured="1 %", is_met=True)
    layout.save(Record("layout", [padding_row], layout.BENCHMARK.rows, []), table)
    layout.save(Record("layout", [engine_row], layout.BENCHMARK.rows, []), [])
    text = results.read_text()
    assert text.index("| padding ") < text.index("| step time ")
    assert "| GPT-OSS-120B |" in text, "the table of the first run stays"
    assert set(json.loads((tmp_path / "results" / "layout.json").read_text())["rows"]) == {"padding-1", "step-time"}
