"""`with_laconic` by torchtitan's interface, against an unsharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from laconic.integrations.torchtitan import with_laconic
from tests.integrations import titan_model
from tests.integrations.titan_model import SETTINGS, ParallelDims, TitanModel, forgets_to_shard, parallelize
from tests.support.language_model import loss_of, make_rows
from tests.support.launch import on_ranks

pytestmark = pytest.mark.machine


def job_train() -> None:
    """The steps of torchtitan's Trainer: meta device, `parallelize_fn`, `to_empty`, `init_weights`, optimizer, loop."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = TitanModel()
    function = with_laconic(parallelize, LaconicArguments(cache="device", granularity="2 rows"))
    model = function(model, parallel_dims=ParallelDims(world), **SETTINGS)
    assert titan_model.fully_shard is torch.distributed.fsdp.fully_shard
    model.to_empty(device="cpu")
    plain = TitanModel()
    for each in (model, plain):
        torch.manual_seed(0)
        with torch.no_grad():
            each.init_weights(buffer_device=None)  # type: ignore[operator]
        each.train()
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, laconic.RaggedTensor)
        assert torch.equal(parameter.full_tensor(), whole)
    assert {unit.cache.where for unit in model._units()} == {"device"}  # type: ignore[operator]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for step in range(4):
        loss = loss_of(model, make_rows(3, seed=world * step + rank)) / world
        loss.backward()
        for other in range(world):
            (loss_of(plain, make_rows(3, seed=world * step + other)) / world).backward()
        norms = [clip(each) for each in (model, plain)]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), whole.detach(), rtol=1e-4, atol=1e-5)


def clip(model: nn.Module) -> torch.Tensor:
    """As torchtitan's `clip_grad_norm_`."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
    return norm


def job_refusals() -> None:
    with pytest.raises(ArgumentError, match="forgets_to_shard has not called fully_shard"):
        with_laconic(forgets_to_shard)(TitanModel())


@pytest.mark.parametrize(("world", "local"), [(3, 1)])
@on_ranks("world", local="local")
def test_the_steps_of_torchtitans_trainer() -> None:
    job_train()
    job_refusals()


@pytest.mark.parametrize(
    "options", [{"param_dtype": "bfloat16"}, {"units": ["Layer"]}, {"audit_every": 5}, {"reshard_after_forward": False}]
)
def test_options_that_torchtitan_decides(options: dict) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=f"{name}=.*is torchtitan's to decide"):
        with_laconic(parallelize, LaconicArguments(**options))
