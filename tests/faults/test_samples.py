"""Fixed samples of the campaigns: damaged files, folders without room, ranks that differ or are lost.

Tests that need no process stay inside. The others are small samples of `python -m tests.faults`, for `make campaigns`.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import laconic
from laconic import _compat, checkpoint, rehearse
from laconic.comm.cluster import Cluster, make_mesh
from tests.faults import damage, disk, kept, kills, ranks_differ, waits
from tests.support.launch import launch, on_ranks
from tests.support.sharded_net import Block, Net, build, shard, train_step

# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "num"), [("tokens", 20), ("rows", 6), ("model", 6)])
def test_damaged_files_do_no_harm(kind: str, num: int, tmp_path: Path) -> None:
    assert damage.try_files(kind, tmp_path / kind, num) == []


def test_the_campaign_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hash of the arrays, flipped tokens are silent."""
    monkeypatch.setattr("laconic.store.folder.file_digest", lambda path, chunk_bytes=None: "no hash")
    found = damage.try_files("tokens", tmp_path / "tokens", 20)
    assert any(harm.startswith("silent") for harm in found)


@pytest.mark.campaign
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    """Each situation ends with one line and exit code 2, and loses nothing."""
    assert launch(disk.try_all, disk.SAMPLE, tmp_path, num_ranks=1, backend=None) == [[]]


# -- models that are dropped -------------------------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.parametrize(
    "strategy",
    ["cache host", "wire 4bit", "offload", "replicas", "islands", "cyclic, not closed", "asynchronous checkpoints"],
)
def test_dropped_models_leave_nothing(strategy: str) -> None:
    growth = kept.growth_of(strategy, rounds=2, warm_up=3)
    if growth["resident bytes"] > kept.MAX_GROWTH_BYTES:  # an arena of the C library may come late; a leak always comes
        growth = kept.growth_of(strategy, rounds=4, warm_up=8)
    assert growth.pop("resident bytes") <= kept.MAX_GROWTH_BYTES
    assert not growth


@on_ranks(1)
def test_classes_go_with_their_models() -> None:
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


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ranks_differ.KINDS if name not in ranks_differ.LAST_WORDS])
def test_ranks_that_differ_end_with_the_difference(name: str) -> None:
    kind = ranks_differ.KINDS[name]
    nodes = kind.num_ranks // kind.num_local
    errors = rehearse.ranks(ranks_differ.play, name, nodes=nodes, local=kind.num_local, goes_on=True)
    assert ranks_differ.missing(name, list(map(str, errors))) == []


@pytest.mark.campaign
def test_the_last_word_of_a_rank_tells_the_difference() -> None:
    for name in ranks_differ.QUICK:
        assert ranks_differ.try_kind(name) == [], name


CAUSE_S = 20.0
"""Twenty processes start at once on a machine that may be busy: the name of a lost rank may take more than a second."""
LOSSES = [
    ("sharded", "kill", 0, 50, CAUSE_S),  # with the store of all ranks
    ("checkpoints", "kill", 2, 100, CAUSE_S),
    ("agreement", "kill", 3, 1, CAUSE_S),
    ("cyclic", "kill", 1, 150, CAUSE_S),
    ("islands", "loop", 2, 1, CAUSE_S),
]


@pytest.mark.campaign
def test_no_process_waits_for_a_lost_one() -> None:
    with ThreadPoolExecutor(len(LOSSES)) as pool:
        losses = list(pool.map(waits.lose, *zip(*LOSSES, strict=True)))
    for loss in losses:
        assert not loss.hanging, loss
        assert not loss.silent, loss
    [loop] = [loss for loss in losses if loss.kind == "loop"]
    stuck = loop.printed[2]
    assert "rank 2 is stuck because rank" in stuck, "it is ended some seconds after the others have failed"
    assert "imed out" in stuck


def timeouts() -> list[float]:
    """The timeouts of all groups that laconic makes, in seconds."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1, timeout=timedelta(seconds=77))
    Cluster.of(mesh)
    make_mesh("cpu", (2,), ("dp",))
    checkpoint.AsyncSaver("never")
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) > 4
    dist.barrier()  # rank 0 has the store, which the others need for their groups
    return [timeout.total_seconds() for group in groups if (timeout := _compat.timeout_of(group))]


@pytest.mark.machine
def test_all_groups_have_the_timeout_of_the_job() -> None:
    for found in launch(timeouts, num_ranks=2, backend=None):
        assert set(found) == {77.0}


# -- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_the_other_island_ends_by_itself_after_a_kill(tmp_path: Path) -> None:
    tally = kills.kill_islands(tmp_path / "runs", {}, 3, of=40)
    assert tally.harms == []
    assert tally.kills == 3
