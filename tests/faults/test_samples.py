"""Fixed samples of the campaigns against a job: damaged files, random configurations, folders without room."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import laconic
from laconic import _compat, checkpoint, rehearse
from laconic.comm.cluster import Cluster, make_mesh
from laconic.config import Config, ConfigError, DataConfig, JobError, from_dict, to_dict
from laconic.train.loop import key_of
from tests.faults import config_fuzz, damage, disk, prepare_fuzz, ranks_differ
from tests.faults.kept import MAX_GROWTH_BYTES, growth_of
from tests.faults.prepare_fuzz import PATH_KEYS, harm_of, job_with_path, wrong_paths
from tests.faults.waits import GRACE_S, Loss, lose_one
from tests.support.jobs import job
from tests.support.launch import launch, run_ranks
from tests.support.sharded_net import Block, Net, build, shard, train_step

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(("kind", "num"), [("tokens", 30), ("rows", 6), ("metrics", 100), ("model", 12)])
def test_damaged_files_do_no_harm(kind: str, num: int, tmp_path: Path) -> None:
    assert list(damage.try_files(kind, tmp_path / kind, num)) == []


def test_the_campaign_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hash of the arrays, flipped tokens are silent."""
    monkeypatch.setattr("laconic.store.folder.file_digest", lambda path, chunk_bytes=None: "no hash")
    found = list(damage.try_files("tokens", tmp_path / "tokens", 20))
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


# -- kept --------------------------------------------------------------------------------------------------------------


SAMPLE = (
    "cache host",
    "wire 4bit",
    "offload",
    "replicas",
    "islands",
    "cyclic, not closed",
    "asynchronous checkpoints",
)


@pytest.mark.parametrize("strategy", SAMPLE)
def test_dropped_models_leave_nothing(strategy: str) -> None:
    growth = growth_of(strategy, rounds=2, warm_up=3)
    if growth["resident bytes"] > MAX_GROWTH_BYTES:  # an arena of the C library may come late; a leak comes every round
        growth = growth_of(strategy, rounds=4, warm_up=8)
    assert growth.pop("resident bytes") <= MAX_GROWTH_BYTES
    assert not growth


def job_classes() -> None:
    """A class that the user makes anew for each model goes with the model, and so do the classes made of it."""
    made: list[weakref.ref[Any]] = []
    for _ in range(2):

        class Own(Net):
            make_block = Block

        model = shard(build(Own))
        assert type(shard(build(Own))) is type(model)
        train_step(model)
        made += [weakref.ref(Own), weakref.ref(type(model))]
        del model, Own
    gc.collect()
    assert [reference() for reference in made] == [None] * 4


def test_classes_go_with_their_models() -> None:
    run_ranks(job_classes, 1)


# -- ranks differ ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ranks_differ.KINDS if name not in ranks_differ.LAST_WORDS])
def test_ranks_that_differ_end_with_the_difference(name: str) -> None:
    kind = ranks_differ.KINDS[name]
    nodes = kind.num_ranks // kind.num_local
    errors = rehearse.ranks(ranks_differ.play, name, nodes=nodes, local=kind.num_local, goes_on=True)
    assert ranks_differ.missing(name, list(map(str, errors))) == []


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_the_last_word_of_a_rank_tells_the_difference() -> None:
    for name in ranks_differ.QUICK:
        assert ranks_differ.try_kind(name)[0] == [], name


# -- waits -------------------------------------------------------------------------------------------------------------


LOSSES = [
    ("sharded", "kill", 0, 0.05),  # with the store of all ranks
    ("checkpoints", "kill", 2, 0.1),
    ("agreement", "kill", 3, 0.0),
    ("cyclic", "kill", 1, 0.1),
    ("islands", "loop", 2, 0.0),
]
CAUSE_S = 20.0
"""Twenty processes start at once on a machine that may be busy: the name of a lost rank may take more than a second."""


@pytest.mark.timeout(240)  # on a busy machine twenty ranks may take long to start
def test_no_rank_waits_for_a_lost_one() -> None:
    with ThreadPoolExecutor(len(LOSSES)) as pool:
        losses: list[Loss] = list(pool.map(partial(lose_one, cause_s=CAUSE_S), LOSSES))
    for loss in losses:
        assert not loss.hanging, loss
        assert not loss.silent, loss
    [loop] = [loss for loss in losses if loss.kind == "loop"]
    stuck = loop.printed.split("--- rank 2\n")[1].split("--- rank 3")[0]
    assert "rank 2 is stuck because rank" in stuck, f"it is ended {GRACE_S} s after the others have failed"
    assert "imed out" in stuck


def job_timeouts() -> list[float]:
    """The timeouts of all groups that laconic makes, in seconds."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1, timeout=timedelta(seconds=77))
    Cluster.of(mesh)
    make_mesh("cpu", (2,), ("dp",))
    checkpoint.AsyncSaver("never")
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) > 4
    dist.barrier()  # rank 0 has the store, which the others need for their groups
    return [timeout.total_seconds() for group in groups if (timeout := _compat.timeout_of(group))]


def test_all_groups_have_the_timeout_of_the_job() -> None:
    for timeouts in launch(job_timeouts, num_ranks=2, timeout_s=90, backend=None):
        assert set(timeouts) == {77.0}
