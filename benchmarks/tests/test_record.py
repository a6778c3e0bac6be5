"""The record of a benchmark, its targets and its pages, and the comparison of the files of two versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import page, unchanged
from tests.support import record, targets
from tests.support.imported import collected


def test_a_run_replaces_its_rows_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(record, "_commit", lambda: "0123abc+")
    for key, measured in (("second", "1"), ("first", "2"), ("second", "3")):
        row = record.Row(key=key, claim=key, measured=measured)
        modules = {"laconic.store.series", "laconic.layout.packing", "elsewhere.layout"}
        record.Record(
            "toy", [row], ["first", "second"], ["--rows", key], measures=["laconic.layout"], imported=modules
        ).save({"raw": record.Table(columns=("a", "b"), rows=[["1", "2, 3"]])}, seen=[measured])
    rows = record.recorded_rows()
    assert [(key, row.measured) for (_, key), row in rows.items()] == [("first", "2"), ("second", "3")]
    assert rows["toy", "second"].command == "python -m benchmarks.toy --rows second"
    assert tuple(rows["toy", "second"].measures) == ("laconic.layout.packing",)
    assert not record.is_old(rows["toy", "second"])
    assert record.recorded("toy")["seen"] == ["3"]
    assert (tmp_path / "results" / "toy-raw.csv").read_text() == 'a,b\n1,"2, 3"\n'


def test_a_row_is_old_once_its_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "laconic" / "toy.py"
    module.parent.mkdir()
    monkeypatch.setattr(record, "SOURCES", tmp_path)

    def is_old(text: str) -> bool:
        module.write_text(text)
        record._digest_of_file.cache_clear()
        return record.is_old(row)

    module.write_text("A = 1\n")
    row = record.Row(claim="", measured="", measures=("laconic.toy",), code=record.code_digest(["laconic.toy"]))
    assert not is_old('"""Some words."""\n\nA = 1  # and more\n')
    assert is_old("A = 2\n")
    module.unlink()
    assert record.is_old(row)


@pytest.mark.machine
def test_modules_are_those_of_every_process() -> None:
    program = (
        "import os\nimport laconic.layout.packing\n"
        "if os.fork() == 0:\n    import laconic.store.series\n    os._exit(0)\nos.wait()"
    )
    with collected() as imported:
        subprocess.run([sys.executable, "-c", program], check=True)
        assert {"laconic.layout.packing", "laconic.store.series"} <= imported()


@pytest.mark.parametrize(
    ("target", "measured", "missed"),
    [
        ("<= 0.47 / <= 0.91", "0.462x / 0.898x", []),
        ("<= 0.45 / <= 0.91", "0.462x / 0.898x", ["0.462 is not <= 0.45"]),
        ("<= 1/15 / <= 1/2", "1/15.5 / 1/1.3", ["0.769231 is not <= 1/2"]),
        (">= 500 / = 0", "1,520 tried; 0 hangs", []),
        ("+- 2 / any", "-2.08% of 4bit, 3 runs", ["-2.08 is not +- 2"]),
        ("<= 1e-4", "within 1.8e-07", []),
        ("<= 1", "1 / 2", ["1 bounds for 2 numbers"]),
    ],
)
def test_a_target_bounds_each_number(target: str, measured: str, missed: list[str]) -> None:
    assert targets.missed(target, measured) == missed


def test_recorded_figures_keep_their_targets() -> None:
    rows = record.recorded_rows()
    for section, known in targets.all_targets().items():
        for key, target in known.items():
            assert (section, key) in rows, f"{section}.{key}: no such row; a row that is gone has no target"
            measured = rows[section, key].measured
            assert not targets.missed(target, measured), f"{section}.{key}: {targets.missed(target, measured)}"


def test_pages_are_of_the_rows_on_record() -> None:
    for name, text in (("results", page.results()), ("studies", page.studies())):
        assert (page.DOCS / f"{name}.md").read_text(encoding="utf-8") == text, "python -m benchmarks.page"
    assert page.results().count("\n") <= 120
    readme = page.README.read_text(encoding="utf-8")
    assert readme == page.front(readme), "python -m benchmarks.page"


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
