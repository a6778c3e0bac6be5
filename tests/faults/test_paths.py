"""Every path that a job names, in every way in which a path can be wrong: training, or a JobError."""

from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.config import Config, ConfigError, DataConfig, JobError, from_dict
from laconic.train.loop import key_of
from tests.faults.prepare_fuzz import PATH_KEYS, harm_of, job_with_path, wrong_paths


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
    assert key_of(config, str(tmp_path / "cache" / "x")) == f"data.cache = {str(tmp_path / 'cache')!r}"
    assert key_of(config, str(tmp_path / "cached")) == f"data.path = {str(tmp_path)!r}"
    assert key_of(config, "/elsewhere") is None
    assert key_of(config, None) is None


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
