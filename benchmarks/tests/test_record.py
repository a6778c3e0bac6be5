"""The record of a benchmark, and the comparison of the files of two versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import unchanged
from laconic.compare.machine import describe_machine, in_words
from tests.support import record


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


def test_a_section_is_replaced_and_its_neighbours_stay(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    record.write_section("one", "first", path)
    record.write_section("two", "second", path)
    record.write_section("one", "third\n\n### inner\n", path)
    text = path.read_text()
    assert text.startswith("# Results\n")
    assert text.endswith("## one\n\nthird\n\n### inner\n\n## two\n\nsecond\n")
    record.write_section("two", "fourth", path)
    assert path.read_text() == text.replace("second", "fourth")


def write_version(folder: Path) -> None:
    """Write the files of one tiny job: metrics, bytes and a checkpoint."""
    (folder / "first" / "checkpoints").mkdir(parents=True)
    (folder / "problem.log").write_text("")
    (folder / "first-0.bytes.json").write_text('{"node/weights/sent_bytes": 10}')
    (folder / "first" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5, "step_s": 0.1}) + "\n")
    (folder / "first" / "checkpoints" / "rank0.bin").write_bytes(b"weights")
    (folder / "first.toml").write_text("train.steps = 8\n")


@pytest.mark.parametrize(
    ("file", "content", "difference"),
    [
        ("first/metrics.jsonl", '{"step": 1, "loss": 2.5, "step_s": 0.9}', None),
        ("first/metrics.jsonl", '{"step": 1, "loss": 2.5000001, "step_s": 0.1}', "0.loss was 2.5 and is 2.5000001"),
        ("first/checkpoints/rank0.bin", "other weights", "rank0.bin"),
        ("first.toml", None, "train.steps was 8 and is 'nothing'"),
        ("problem.log", "failed: out of memory", "failed: out of memory"),
    ],
)
def test_a_difference_is_found_and_excluded_keys_may_differ(
    tmp_path: Path, file: str, content: str | None, difference: str | None
) -> None:
    works = [tmp_path / "before", tmp_path / "after"]
    for work in works:
        write_version(work / "host")
    changed = works[1] / "host" / file
    changed.unlink() if content is None else changed.write_text(content)
    row = unchanged.compare("host", works)
    assert row["equal?"] == ("yes" if difference is None else "NO")
    assert len(row["differences"]) == (difference is not None)
    assert difference is None or difference in row["differences"][0]


@pytest.mark.machine
def test_the_comparison_does_not_import_laconic() -> None:
    program = "import benchmarks.unchanged, sys; sys.exit('laconic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
