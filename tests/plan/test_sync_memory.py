"""The planned memory of a sync against the allocator and the vectors that `LocalSteps` keeps; a plan among ranks."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.comm.cluster import Cluster
from laconic.config import Config, ShardConfig, SyncConfig, from_dict
from laconic.islands.local_steps import LocalSteps
from laconic.islands.policies import OuterSGD
from laconic.plan.candidates import CANDIDATES
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor
from laconic.plan.rehearsed import LocalStepsProgram
from laconic.rehearse.rings import Places
from laconic.strategies.memory import measured_peak
from tests.plan.traces import cluster, spec, trace, work
from tests.support.jobs import corpus, table
from tests.support.launch import run_ranks

NUMEL = 3 * 2**16
SETTINGS: list[dict[str, Any]] = [
    {"codec": "fp32"},
    {"codec": "bf16", "outer_momentum": 0.0},
    {"codec": "int4"},
    {"codec": "int8", "error_feedback": True},
    {"codec": "top64", "error_feedback": 0.9},
]


def submit_here(function: Any, *arguments: Any) -> Future[Any]:
    """Run a sync in the thread that the profiler watches."""
    found: Future[Any] = Future()
    found.set_result(function(*arguments))
    return found


def make_local(model: nn.Module, codec: str = "int4", outer_momentum: float = 0.9, **settings: Any) -> LocalSteps:
    optimizer, mesh = torch.optim.SGD(model.parameters(), lr=0.1), laconic.init_mesh("cpu", islands=2)
    outer = OuterSGD(momentum=outer_momentum)
    return LocalSteps(model, optimizer, mesh=mesh, every=1, codec=codec, outer=outer, **settings)


def job_measured() -> list[tuple[float, float]]:
    """For each of the settings what a rank keeps, and the peak of a sync besides, for one element."""
    found = []
    for settings in SETTINGS:
        local = make_local(nn.Linear(NUMEL // 512, 512, bias=False), **settings)
        with mock.patch.object(local._thread, "submit", submit_here):
            for _ in range(2):
                local.advance()
            with measured_peak() as peak:
                local.advance()
        assert peak.nbytes is not None
        found.append((sum(each.nbytes for each in local.kept_tensors()) / NUMEL, peak.nbytes / NUMEL))
    return found


@pytest.mark.machine
def test_a_sync_takes_what_the_allocator_says() -> None:
    for settings, (kept, peak) in zip(SETTINGS, run_ranks(job_measured, 2, local=1)[0], strict=True):
        model, places = trace([[spec("weight", 512, NUMEL // 512)]]), Places(nodes=1, local=1, islands=2)
        config = Config(sync=SyncConfig.of_keys({"mode": "local", "islands": 2, **settings}))
        reading = LocalStepsProgram(cluster(2, 1), work(model, config, places)).read()
        lost = 4 if settings.get("error_feedback") else 0  # a sync makes it anew, beside that of the sync before
        assert reading.host_bytes / NUMEL == pytest.approx(kept + lost, rel=0.001), settings
        assert reading.peak["transfers"] / NUMEL == pytest.approx(peak, rel=0.02), settings


def test_slices_keep_a_vector_more(tmp_path: Path) -> None:
    """The divisors: as many bytes as the outer parameters."""
    corpus(tmp_path)
    kept, states = [], []
    for slices in (1, 2):
        job = table(tmp_path, sync={"mode": "local", "slices": slices})
        estimate = Predictor(from_dict(Config, job), cluster(2, 1)).estimate(CANDIDATES["local-steps"])
        assert isinstance(estimate, Estimate), estimate
        kept.append(estimate.host_bytes)
        states.append(estimate.resting["optimizer"])
    assert kept[1] - kept[0] == pytest.approx(states[0] / 2, rel=0.03)  # AdamW keeps two vectors of the whole model


def plan_among_groups() -> tuple[int, bool, float]:
    """Rehearse another cluster on rank 0, and train on all ranks with the groups from before."""
    mesh = laconic.init_mesh("cpu")
    before, model = Cluster.of(mesh), trace([[spec("weight", 64, 64)] for _ in range(2)])
    if dist.get_rank() == 0:
        config = Config(shard=ShardConfig.of_keys({"wire": "4bit"}))
        for nodes in (3, 5, 3):
            places = Places(nodes=nodes, local=2)
            assert work(model, config, places).rehearsals.of(config, model, places).tape.entries
    is_kept = laconic.init_mesh("cpu") is mesh and Cluster.of(mesh) is before
    layer = laconic.fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh, cache="host", wire="4bit", broadcast=True)
    layer(torch.ones(2, 8)).sum().backward()
    return dist.get_world_size(), is_kept, float(layer.weight.grad.full_tensor().sum())


@pytest.mark.machine
def test_a_rehearsal_leaves_groups_meshes_and_tables_as_they_are() -> None:
    for size, is_kept, total in run_ranks(plan_among_groups, 2, local=1):
        assert (size, is_kept) == (2, True)
        assert total == pytest.approx(128, rel=1e-2)  # in few bits
