"""`with_laconic` by torchtitan's interface, against an unsharded model. A stand-in calls as torchtitan 0.3.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from laconic.integrations.torchtitan import with_laconic
from tests.support.language_model import LanguageModel, loss_of, make_rows
from tests.support.launch import on_ranks

SETTINGS: dict[str, Any] = {
    "training": SimpleNamespace(mixed_precision_param="float32", mixed_precision_reduce="float32"),
    "parallelism": SimpleNamespace(fsdp_reshard_after_forward="default"),
    "compile_config": SimpleNamespace(enable=False, components=["model", "loss"]),
    "ac_config": None,
    "dump_folder": "./outputs",
}
"""What torchtitan's Trainer passes beside the model and `parallel_dims`."""


class TitanModel(LanguageModel):
    def init_weights(self, *, buffer_device: torch.device | None = None) -> None:
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.trunc_normal_(parameter, std=0.3)
            else:
                nn.init.constant_(parameter, 0.7)
        self.scale = torch.tensor(0.5, device=buffer_device)


def parallelize(model: TitanModel, *, parallel_dims: Any, training: Any, parallelism: Any, **_: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    config: dict[str, Any] = {"mesh": parallel_dims.get_mesh(["fsdp"]), "mp_policy": policy}
    reshards = parallelism.fsdp_reshard_after_forward == "always"
    fully_shard([model.tokens, model.norm, model.head], **config, reshard_after_forward=reshards)
    for layer in model.layers:
        fully_shard(layer, **config, reshard_after_forward=True)
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # its Trainer divides the loss by the tokens of all ranks
    return model


@pytest.mark.machine
@on_ranks(3, local=1)
def test_the_steps_of_torchtitans_trainer() -> None:
    """The steps of torchtitan's Trainer: meta device, `parallelize_fn`, `to_empty`, `init_weights`, optimizer, loop."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = TitanModel()
    function = with_laconic(parallelize, LaconicArguments(cache="device", granularity="2 rows"))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    model = function(model, parallel_dims=SimpleNamespace(get_mesh=lambda names: mesh[tuple(names)]), **SETTINGS)
    assert fully_shard is torch.distributed.fsdp.fully_shard
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


def test_what_torchtitan_decides_and_a_function_that_does_not_shard() -> None:
    decided = {"param_dtype": "bfloat16", "units": ["Layer"], "audit_every": 5, "reshard_after_forward": False}
    for name, value in decided.items():
        with pytest.raises(ArgumentError, match=f"{name}=.*is torchtitan's to decide"):
            with_laconic(parallelize, LaconicArguments(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="has not called fully_shard"):
        with_laconic(lambda model, **_: model)(TitanModel())
