"""benchmarks.unchanged: the comparison of the files of two versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import unchanged

pytestmark = pytest.mark.machine

JOB = "host"


def write_version(work: Path, job: str = JOB) -> Path:
    """Write the files of one tiny job: metrics, bytes and a checkpoint. Returns the job's folder."""
    folder = work / job
    (folder / "first" / "checkpoints").mkdir(parents=True)
    (folder / "problem.log").write_text("")
    (folder / "first" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5, "step_s": 0.1}) + "\n")
    (folder / "first" / "checkpoints" / "rank0.bin").write_bytes(b"weights")
    (folder / "first-0.bytes.json").write_text(
        json.dumps({"node/weights/sent_bytes": 10, "local/weights/sent_bytes": 5})
    )
    (folder / "first.toml").write_text("train.steps = 8\n")
    return folder


@pytest.fixture
def works(tmp_path: Path) -> list[Path]:
    """Two equal versions."""
    paths = [tmp_path / "before", tmp_path / "after"]
    for path in paths:
        write_version(path)
    return paths


def rewrite_metrics(folder: Path, **values: float) -> None:
    file = folder / "first" / "metrics.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | values) + "\n")


def test_equal_files_are_equal(works: list[Path]) -> None:
    row = unchanged.compare(JOB, works)
    assert row["equal?"] == "yes"
    assert row["differences"] == []
    assert [row[kind] for kind in unchanged.KINDS] == ["1/1", "1/1", "2/2", "2/2"]


def test_a_changed_loss_is_a_difference(works: list[Path]) -> None:
    rewrite_metrics(works[1] / JOB, loss=2.5000001)
    row = unchanged.compare(JOB, works)
    assert row["equal?"] == "NO"
    assert row["losses"] == "0/1"
    assert row["differences"] == ["host/first/metrics.jsonl:0.loss was 2.5 and is 2.5000001"]


def test_a_changed_checkpoint_is_a_difference(works: list[Path]) -> None:
    (works[1] / JOB / "first" / "checkpoints" / "rank0.bin").write_bytes(b"other weights")
    row = unchanged.compare(JOB, works)
    assert row["checkpoint files"] == "0/1"
    assert len(row["differences"]) == 1


@pytest.mark.parametrize("missing_in", [0, 1])
def test_a_missing_file_is_a_difference(works: list[Path], missing_in: int) -> None:
    (works[missing_in] / JOB / "first.toml").unlink()
    row = unchanged.compare(JOB, works)
    assert row["rest"] == "1/2"
    (difference,) = row["differences"]
    assert difference.startswith("host/first.toml:train.steps was ")
    assert "'nothing'" in difference


def test_an_excluded_key_may_differ(works: list[Path]) -> None:
    rewrite_metrics(works[1] / JOB, step_s=0.9)
    assert unchanged.compare(JOB, works)["equal?"] == "yes"


def test_a_job_that_failed_is_a_difference(works: list[Path]) -> None:
    (works[1] / JOB / "problem.log").write_text("failed: out of memory")
    row = unchanged.compare(JOB, works)
    assert row["equal?"] == "NO"
    assert row["differences"] == ["after failed: out of memory"]


def test_bytes_of_cyclic_jobs_are_summed_over_levels(tmp_path: Path) -> None:
    works = [tmp_path / "before", tmp_path / "after"]
    for work in works:
        write_version(work, "cyclic-v1")
    (works[1] / "cyclic-v1" / "first-0.bytes.json").write_text(json.dumps({"local/weights/sent_bytes": 15}))
    assert unchanged.compare("cyclic-v1", works)["equal?"] == "yes"


def test_renamed_keys_are_compared_under_their_new_names(works: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (works[0] / JOB / "first.toml").write_text("train.num_steps = 8\n")
    assert unchanged.compare(JOB, works)["equal?"] == "NO"
    monkeypatch.setattr(unchanged, "RENAMED_KEYS", {"train.num_steps": "train.steps"})
    assert unchanged.compare(JOB, works)["equal?"] == "yes"


def test_the_command_does_not_import_laconic() -> None:
    program = "import benchmarks.unchanged, sys; sys.exit('laconic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
