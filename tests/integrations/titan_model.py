"""A stand-in for torchtitan 0.3.0: a model's `parallelize_fn` with the calls of `torchtitan.distributed.fsdp`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.support.language_model import LanguageModel

TRAINING = SimpleNamespace(mixed_precision_param="float32", mixed_precision_reduce="float32", enable_cpu_offload=False)
PARALLELISM = SimpleNamespace(fsdp_reshard_after_forward="default")
SETTINGS: dict[str, Any] = {
    "training": TRAINING,
    "parallelism": PARALLELISM,
    "compile_config": SimpleNamespace(enable=False, components=["model", "loss"]),
    "ac_config": None,
    "dump_folder": "./outputs",
}
"""What torchtitan's Trainer passes beside the model and `parallel_dims`."""


class ParallelDims:
    """The part of torchtitan's class that a model needs for data parallelism alone."""

    def __init__(self, world_size: int) -> None:
        self.mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))

    def get_mesh(self, names: list[str]) -> DeviceMesh:
        return self.mesh[tuple(names)]


class TitanModel(LanguageModel):
    def init_weights(self, *, buffer_device: torch.device | None = None) -> None:
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.trunc_normal_(parameter, std=0.3)
            else:
                nn.init.constant_(parameter, 0.7)
        self.scale = torch.tensor(0.5, device=buffer_device)


def parallelize(
    model: TitanModel,
    *,
    parallel_dims: ParallelDims,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
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


def forgets_to_shard(model: nn.Module, **settings: Any) -> nn.Module:
    return model
