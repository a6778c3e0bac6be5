"""The world of a rehearsal, beside the one of the process that plans."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.comm.cluster import Cluster
from laconic.config import Config, ShardConfig
from laconic.plan.program import work_of
from laconic.plan.rehearsal import Rehearsals
from tests.plan.traces import model_of, spec, trace
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine


def plan_among_groups() -> tuple[int, bool, float]:
    """Rehearse another cluster on rank 0, and train on all ranks with the groups from before."""
    mesh = laconic.init_mesh("cpu")
    before, model = Cluster.of(mesh), trace([[spec("weight", 64, 64)] for _ in range(2)])
    if dist.get_rank() == 0:
        config = Config(shard=ShardConfig.of_keys({"wire": "4bit"}))
        rehearsals = Rehearsals(build=lambda _: model_of(model))
        work = work_of(config, device_type="cpu", trace=model, rehearsals=rehearsals)
        for nodes in (3, 5, 3):
            assert work.rehearsals.of(config, model, nodes=nodes, local=2, islands=1).tape.entries
    is_kept = laconic.init_mesh("cpu") is mesh and Cluster.of(mesh) is before
    layer = laconic.fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh, cache="host", wire="4bit", broadcast=True)
    layer(torch.ones(2, 8)).sum().backward()
    return dist.get_world_size(), is_kept, float(layer.weight.grad.full_tensor().sum())


def test_a_rehearsal_leaves_groups_meshes_and_tables_as_they_are() -> None:
    for size, is_kept, total in run_ranks(plan_among_groups, 2, local=1):
        assert (size, is_kept) == (2, True)
        assert total == pytest.approx(128, rel=1e-2)  # in few bits
