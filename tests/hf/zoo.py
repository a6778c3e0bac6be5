"""Tiny configurations of the architectures tried, and one way to spread each model over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.config import LoraConfig, ModelConfig
from laconic.hf.layers import layers_to_shard
from laconic.models.build import build_model, materialize

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "intermediate_size": 48,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
}
LORA = LoraConfig(enabled=True, rank=3, alpha=6.0)
NO_LORA = LoraConfig()
STRATEGIES = ("laconic", "fsdp2", "ddp")


def spread(config: ModelConfig, lora: LoraConfig, strategy: str) -> tuple[nn.Module, int]:
    """Build, shard and materialise a model on this rank. Returns the model and the bytes that this rank has read."""
    model = build_model(config, lora)
    units = [*layers_to_shard(model), model]
    if strategy == "laconic":
        import laconic

        mesh = laconic.init_mesh("cpu")
        for unit in units:
            laconic.fully_shard(unit, mesh=mesh, cache="host")
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in units:
            fully_shard(unit, mesh=mesh)
    return model, materialize(model, config, "cpu")


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return gathered parameters, tied ones under each name, and buffers."""
    tensors: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names that only one of two sets has, and the names of tensors with other values or dtypes."""
    names = first.keys() ^ second.keys()
    return sorted(names) + [
        name
        for name in first.keys() & second.keys()
        if first[name].dtype != second[name].dtype or not torch.equal(first[name], second[name])
    ]


def tokens() -> Tensor:
    return torch.randint(0, 67, (2, 16), generator=torch.Generator().manual_seed(0))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, rows: Tensor | None = None) -> list[float]:
    """Take steps on some rows, or on `tokens`, and return the losses."""
    rows, losses = tokens() if rows is None else rows, []
    for _ in range(steps):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
