"""The planned memory of a sync against the allocator, and against the vectors that `LocalSteps` keeps."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.config import SyncConfig
from laconic.islands.local_steps import LocalSteps
from laconic.islands.policies import OuterSGD
from laconic.plan.sync_memory import sync_memory
from laconic.strategies.memory import measured_peak
from tests.support.launch import run_ranks
from tests.support.partial_models import partial_net

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


def vector_bytes(local: LocalSteps) -> int:
    """The bytes of all vectors of a rank's elements between syncs."""
    vectors = list(local._residuals)
    for fragment in local.fragments:
        more = (fragment.divisor, fragment._is_trained)
        vectors += [*fragment.vectors(), *(each for each in more if each is not None)]
    return sum(vector.nbytes for vector in vectors)


def job_measured() -> list[tuple[float, float]]:
    """For each of the settings the resting bytes and the peak of a sync, for one element."""
    found = []
    for settings in SETTINGS:
        local = make_local(nn.Linear(NUMEL // 512, 512, bias=False), **settings)
        with mock.patch.object(local._thread, "submit", submit_here):
            for _ in range(2):
                local.advance()
            with measured_peak() as peak:
                local.advance()
        assert peak.nbytes is not None
        found.append((vector_bytes(local) / NUMEL, peak.nbytes / NUMEL))
    return found


def test_a_sync_takes_what_the_allocator_says() -> None:
    for settings, (resting, peak) in zip(SETTINGS, run_ranks(job_measured, 2, local=1)[0], strict=True):
        planned = sync_memory(SyncConfig.of_keys({"mode": "local", **settings}), 2)
        assert planned.resting == pytest.approx(resting, rel=0.01), settings
        assert planned.working == pytest.approx(peak, rel=0.02), settings


def job_sliced() -> float:
    local = make_local(partial_net(dist.get_rank(), 2))
    local.advance()
    local.finish()
    return vector_bytes(local) / sum(fragment.flat.numel() for fragment in local.fragments)


def test_slices_keep_two_vectors_more() -> None:
    planned = sync_memory(SyncConfig(mode="local", slices=2), 2)
    assert run_ranks(job_sliced, 2, local=1) == pytest.approx([planned.resting] * 2, rel=0.01)
    whole = sync_memory(SyncConfig(mode="local"), 2)
    assert planned.resting == pytest.approx(whole.resting + 8)
