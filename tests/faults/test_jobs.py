"""Fixed samples of the campaigns against a job: damaged files, random configurations, folders without room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import cluster_fuzz, config_fuzz, disk, job_damage, prepare_fuzz
from tests.support.jobs import job
from tests.support.launch import launch


@pytest.mark.parametrize(("kind", "num"), [("tokens", 30), ("rows", 6), ("metrics", 100), ("model", 12)])
def test_damaged_files_do_no_harm(kind: str, num: int, tmp_path: Path) -> None:
    assert list(job_damage.try_kind(kind, tmp_path / kind, num)) == []


def test_the_campaign_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hash of the arrays, flipped tokens are silent."""
    monkeypatch.setattr("laconic.store.folder.digest_of", lambda path, chunk_bytes=None: "no hash")
    found = list(job_damage.try_kind("tokens", tmp_path / "tokens", 20))
    assert any(harm.startswith("silent") for harm in found)


def test_random_configurations_and_command_lines() -> None:
    assert config_fuzz.try_files(60) + config_fuzz.try_bytes(40) + config_fuzz.try_commands(8) == []
    assert cluster_fuzz.try_clusters(100) == []


def test_random_jobs_train_or_are_refused(tmp_path: Path) -> None:
    [(num_trained, harms)] = launch(
        prepare_fuzz.try_jobs, 5, tmp_path / "jobs", num_ranks=1, timeout_s=100, backend=None
    )
    assert harms == []
    assert num_trained


def harm_of_a_defect(folder: Path) -> str:
    """The harm of a job whose tokenizer fails with a foreign error. The job leaves its process group behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laconic.train.loop.load_tokenizer", lambda name: {}["x"])
        return str(prepare_fuzz.harm_of(job(folder)))


def test_the_campaign_of_jobs_sees_harm(tmp_path: Path) -> None:
    [harm] = launch(harm_of_a_defect, tmp_path, num_ranks=1, timeout_s=60, backend=None)
    assert harm.startswith("foreign tracebacks: KeyError('x')")


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    """Each situation ends with one line and exit code 2, and loses nothing."""
    assert launch(disk.try_all, disk.SAMPLE, tmp_path, num_ranks=1, timeout_s=100, backend=None) == [[]]
