"""The record of a benchmark: rows of several machines, and rows of earlier runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.compare.machine import describe_machine, in_words
from tests.support import record

pytestmark = pytest.mark.machine


def test_each_row_is_shown_with_the_machine_that_measured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was recorded before rows said their machine has that of its file."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "RESULTS.md")
    first, second = (
        record.Row(key=key, claim=key, required="1", measured="1", is_met=True) for key in ("first", "second")
    )
    record.Record("toy", [first], ["first", "second"], ["--rows", "first"]).save()
    file = tmp_path / "results" / "toy.json"
    saved = json.loads(file.read_text())
    saved["machine"]["cpu"] = "another processor"
    del saved["rows"]["first"]["machine"]
    file.write_text(json.dumps(saved))

    record.Record("toy", [second], ["first", "second"], ["--rows", "second"]).save()
    text = (tmp_path / "RESULTS.md").read_text()
    here = in_words(describe_machine())
    assert "`python -m benchmarks.toy --rows first`, " in text
    assert f"(first); {in_words(saved['machine'])}.\n\n`python -m benchmarks.toy --rows second`, " in text
    assert f"(second); {here}.\n\n| claim" in text
    assert json.loads(file.read_text())["rows"]["first"]["machine"] == in_words(saved["machine"])
