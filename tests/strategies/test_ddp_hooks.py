"""DDP with torch's own hooks on Gloo: what they do to gradients, and jobs that train with them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from laconic.strategies.ddp_hooks import _in_bfloat16, _one_by_one
from tests.support.jobs import job, train_all
from tests.support.launch import on_ranks, run_ranks

pytestmark = pytest.mark.machine

STEPS = 4


def gradients(hook: Any, state: Any = None, *, bucket_mb: float = 1e-3) -> list[list[torch.Tensor]]:
    """The gradients of some steps of two micro-batches, in many buckets, of matrices and vectors of odd sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 37))))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        for micro_batch in range(2):
            wrapped.require_backward_grad_sync = micro_batch == 1
            wrapped(torch.randn(3, 37)).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        wrapped.zero_grad(set_to_none=True)
    return found


@on_ranks(3)
def test_gradients_are_summed_in_bfloat16() -> None:
    exact, rounded = gradients(None), gradients(_in_bfloat16)
    for ours, theirs in zip(chain(*rounded), chain(*exact), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, ours.bfloat16().float())
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


@on_ranks(3)
def test_powersgd_is_exact_at_first_and_then_of_a_low_rank_and_feeds_back_what_it_loses() -> None:
    """All ranks have the same gradients. Vectors stay exact."""
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    exact, factored = gradients(None), gradients(_one_by_one(powerSGD_hook), state)
    for step, (ours, theirs) in enumerate(zip(factored, exact, strict=True)):
        for mine, other in zip(ours, theirs, strict=True):
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine)
            assert all(torch.equal(each, mine) for each in every)
            if step < 2 or mine.dim() == 1:
                torch.testing.assert_close(mine, other)
            else:
                assert torch.linalg.matrix_rank(mine, rtol=1e-4) <= 4
    lost = sum(float(error.square().sum()) for error in state.error_dict.values())
    assert lost > 0


@on_ranks(2)
def test_a_failed_hook_ends_backward() -> None:
    def fail(state: Any, bucket: Any) -> Any:
        raise ConnectionError("the wire is cut")

    with pytest.raises(Exception, match="the wire is cut"):
        gradients(_one_by_one(fail))


@pytest.mark.parametrize("bucket_mb", [1e-3, 25])
@on_ranks(4)
def test_many_buckets_are_under_way_on_gloo(bucket_mb: float) -> None:
    """Gloo has two threads, on which no sum waits for another one."""
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    exact = gradients(None, bucket_mb=bucket_mb)
    factored = gradients(_one_by_one(powerSGD_hook), state, bucket_mb=bucket_mb)
    for ours, theirs in zip(chain(*factored[:2]), chain(*exact[:2]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_job_trains_near_ddp(tmp_path: Path) -> None:
    """Full parameters and adapters, of which no matrix is worth two factors."""
    adapters = {"enabled": True, "rank": 2, "targets": ["q_proj"]}
    configs = [
        job(
            tmp_path,
            shard={"strategy": name},
            lora=lora,
            train={"accumulation": 2, "resume": "never", "output": str(tmp_path / f"{name}-{len(lora)}")},
        )
        for lora in ({}, adapters)
        for name in ("ddp", "ddp-bf16", "ddp-powersgd")
    ]
    found = run_ranks(train_all, 4, configs, local=2)[0]
    full, of_adapters = found[:3], found[3:]
    for exact, rounded, factored in (full, of_adapters):
        assert rounded["losses"][0] == factored["losses"][0] == exact["losses"][0]
        assert rounded["losses"] == pytest.approx(exact["losses"], rel=2e-3)
        assert factored["losses"][:3] == pytest.approx(exact["losses"][:3], rel=1e-5)
        assert factored["losses"] == pytest.approx(exact["losses"], rel=2e-3)
    assert full[2]["losses"][3] != full[0]["losses"][3]
    assert of_adapters[2]["losses"] == pytest.approx(of_adapters[0]["losses"], rel=1e-5)
