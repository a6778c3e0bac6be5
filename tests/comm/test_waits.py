"""Ranks in library use that lose another rank end soon: a sample of the campaign in tests/faults/waits.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

import laconic
from laconic import _compat, checkpoint
from laconic.comm.cluster import Cluster, make_mesh
from tests.faults.waits import GRACE_S, Loss, lose_one
from tests.support.launch import launch

SAMPLE = [
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
    with ThreadPoolExecutor(len(SAMPLE)) as pool:
        losses: list[Loss] = list(pool.map(partial(lose_one, cause_s=CAUSE_S), SAMPLE))
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
