"""Fixed samples of random configurations and jobs, and wrong paths: each works, or is refused with one line.

`python -m tests.faults --rows config-fuzz,cluster-fuzz,prepare-fuzz` tries thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from laconic import rehearse
from laconic.config import Config, ConfigError, DataConfig, JobError, from_dict, to_dict
from tests.faults import fuzz
from tests.support.jobs import job


@pytest.mark.parametrize(
    ("try_some", "num"),
    [(fuzz.try_files, 15), (fuzz.try_bytes, 20), (fuzz.try_commands, 3), (fuzz.try_clusters, 100)],
)
def test_random_configurations_are_jobs_or_one_line(try_some: Callable[[int], list[str]], num: int) -> None:
    assert try_some(num) == []


def alone(config: Config) -> str | None:
    """`harm_of` a job, as the only rank."""
    return rehearse.ranks(fuzz.harm_of, config)[0]


def test_random_jobs_train_or_are_refused(tmp_path: Path) -> None:
    num_trained, harms = fuzz.try_jobs(3, tmp_path / "jobs", use=alone)
    assert harms == []
    assert num_trained


def test_the_campaign_of_jobs_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that fails with a foreign error."""
    monkeypatch.setattr("laconic.train.loop.load_tokenizer", lambda name: {}["x"])
    assert str(alone(job(tmp_path))).startswith("foreign tracebacks: KeyError('x')")


@pytest.mark.parametrize("key", fuzz.PATH_KEYS)
def test_a_wrong_path_is_refused_in_one_line(key: str, tmp_path: Path) -> None:
    paths = fuzz.wrong_paths(tmp_path)
    assert paths
    for path in paths:
        try:
            config = from_dict(Config, fuzz.job_with_path(key, path, tmp_path))
        except ConfigError:
            continue
        assert alone(config) == "", f"{key} = {str(path)[:80]}"  # "": refused in good order


def test_an_error_of_a_file_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.train import loop

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "cache" / "corpus.json"))

    monkeypatch.setattr(loop, "check_job", lambda *_: None)
    monkeypatch.setattr(loop, "Trainer", fail)
    table = {"data": {"cache": str(tmp_path / "cache")}, "train": {"output": str(tmp_path / "out"), "device": "cpu"}}
    [error] = rehearse.ranks(loop.run, from_dict(Config, table), goes_on=True)
    assert isinstance(error, JobError)
    assert "data.cache = " in str(error)
    assert str(error).endswith("mend that path, or choose another")


def test_a_file_is_named_by_the_key_above_it(tmp_path: Path) -> None:
    from laconic.train.loop import key_of

    config = Config(data=DataConfig(kind="text", cache=str(tmp_path / "cache"), path=str(tmp_path)))
    assert key_of(to_dict(config), str(tmp_path / "cache" / "x")) == f"data.cache = {str(tmp_path / 'cache')!r}"
    assert key_of(to_dict(config), str(tmp_path / "cached")) == f"data.path = {str(tmp_path)!r}"
    assert key_of(to_dict(config), "/elsewhere") is None
    assert key_of(to_dict(config), None) is None
