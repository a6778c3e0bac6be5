"""DDP with states cut over the ranks: the same bits as DDP, states that add up to its own, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.config import JobError, OptimizerConfig
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_optimizer
from laconic.strategies.zero1 import make_cut_optimizer
from tests.support.jobs import job, train_all
from tests.support.launch import on_ranks, run_ranks


def trained(make: Any, settings: OptimizerConfig) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Three steps of two micro-batches on odd sizes, clipped, with a learning rate that changes and a frozen weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 3), nn.Linear(3, 1))
    model[3].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make(model, settings)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for micro_batch in range(2):
            wrapped.require_backward_grad_sync = micro_batch == 1
            wrapped(torch.randn(2, 7)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


def job_trains_as_ddp() -> None:
    for fused in (True, False):
        settings = OptimizerConfig(lr=0.01, weight_decay=0.1, fused=fused)
        expected, whole = trained(make_optimizer, settings)
        found, cut = trained(make_cut_optimizer, settings)
        assert all(map(torch.equal, found, expected))
        assert not cut.state
        kept: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(kept, state_nbytes(cut.optim))  # type: ignore[attr-defined]
        assert sum(kept) == state_nbytes(whole)
        assert max(kept) < state_nbytes(whole)


@pytest.mark.machine
@pytest.mark.parametrize("world_size", [3, pytest.param(9, marks=pytest.mark.campaign)])
def test_the_bits_are_those_of_ddp(world_size: int) -> None:
    """Nine ranks are more than parameters that train: some update nothing."""
    run_ranks(job_trains_as_ddp, world_size)


@on_ranks(1)
def test_parameters_of_two_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16))
    with pytest.raises(JobError, match=r"2 dtypes, torch.bfloat16, torch.float32; use 'ddp'"):
        make_cut_optimizer(model, OptimizerConfig())


@pytest.mark.machine
def test_a_job_trains_as_under_ddp_with_fewer_states(tmp_path: Path) -> None:
    configs = [
        job(
            tmp_path,
            shard={"strategy": name},
            train={"accumulation": 2, "output": str(tmp_path / name)},
            log={"memory_step": 2},
        )
        for name in ("ddp", "ddp-zero1")
    ]
    whole, cut = run_ranks(train_all, 3, configs, local=3)[0]
    assert cut["losses"] == whole["losses"]
    assert cut["grad_norms"] == whole["grad_norms"]
    states = 8 * whole["num_parameters"]
    assert states / 2 < whole["resting_bytes"] - cut["resting_bytes"] < states
