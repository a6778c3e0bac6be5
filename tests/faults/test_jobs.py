"""Fixed samples of the campaigns against a job: damaged files, random configurations, folders without room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.config import Config, ConfigError, DataConfig, JobError, from_dict, to_dict
from laconic.train.loop import key_of
from tests.faults import config_fuzz, disk, job_damage, prepare_fuzz
from tests.faults.prepare_fuzz import PATH_KEYS, harm_of, job_with_path, wrong_paths
from tests.support.jobs import job
from tests.support.launch import launch


@pytest.mark.parametrize(("kind", "num"), [("tokens", 30), ("rows", 6), ("metrics", 100), ("model", 12)])
def test_damaged_files_do_no_harm(kind: str, num: int, tmp_path: Path) -> None:
    assert list(job_damage.try_kind(kind, tmp_path / kind, num)) == []


def test_the_campaign_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hash of the arrays, flipped tokens are silent."""
    monkeypatch.setattr("laconic.store.folder.file_digest", lambda path, chunk_bytes=None: "no hash")
    found = list(job_damage.try_kind("tokens", tmp_path / "tokens", 20))
    assert any(harm.startswith("silent") for harm in found)


def test_random_configurations_and_command_lines() -> None:
    assert config_fuzz.try_files(60) + config_fuzz.try_bytes(40) + config_fuzz.try_commands(8) == []
    assert config_fuzz.try_clusters(100) == []


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


@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_wrong_path_is_refused_in_one_line(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    paths = wrong_paths(tmp_path)
    assert paths
    for path in paths:
        try:
            config = from_dict(Config, job_with_path(key, path, tmp_path))
        except ConfigError:
            continue
        assert harm_of(config) == "", f"{key} = {str(path)[:80]}"  # "": refused in good order


def test_a_file_is_named_by_the_key_above_it(tmp_path: Path) -> None:
    config = Config(data=DataConfig(kind="text", cache=str(tmp_path / "cache"), path=str(tmp_path)))
    assert key_of(to_dict(config), str(tmp_path / "cache" / "x")) == f"data.cache = {str(tmp_path / 'cache')!r}"
    assert key_of(to_dict(config), str(tmp_path / "cached")) == f"data.path = {str(tmp_path)!r}"
    assert key_of(to_dict(config), "/elsewhere") is None
    assert key_of(to_dict(config), None) is None


def test_an_error_of_a_file_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.train import loop

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "cache" / "corpus.json"))

    monkeypatch.setattr(loop, "check_job", lambda *_: None)
    monkeypatch.setattr(loop, "Trainer", fail)
    table = {"data": {"cache": str(tmp_path / "cache")}, "train": {"output": str(tmp_path / "out"), "device": "cpu"}}
    with pytest.raises(JobError, match=r"data\.cache = .*Permission denied.*mend that path"):
        loop.run(from_dict(Config, table))
    dist.destroy_process_group()  # which `run` leaves to the end of the process after such an error
