"""Small models of every kind that partial updates know, and helpers of their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laconic.partial.patterns import Kind, sliced_layer
from laconic.partial.updates import partial_updates
from laconic.ragged.parts import sliced_parameters
from tests.support.sharded_net import Net

VOCAB = 50
BOTH: tuple[Kind, ...] = ("mlp", "attention")
"""All kinds of layers that partial updates know."""
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_EXPERTS = {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TYPES = {
    "llama-mha-biases": "llama", "gpt-neox": "gpt_neox", "gpt-oss": "gpt_oss", "qwen3-moe": "qwen3_moe",
}  # fmt: skip
"""The model's type in transformers, where the name is another."""
_SIZES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "llama-mha-biases": {**_COMMON, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**_COMMON, "head_dim": 6},
    "phi3": {**_COMMON, "pad_token_id": 0},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 8, "vocab_size": VOCAB, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0,
    },
    "gpt-neox": {
        **{key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "opt": {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0,
    },
    "mixtral": _EXPERTS,
    "gpt-oss": {**_EXPERTS, "head_dim": 4, "rope_parameters": _ROPE},
    "qwen3-moe": {
        **_COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4,
        "decoder_sparse_step": 1,
    },
}  # fmt: skip

MODELS = (
    "llama", "llama-mha-biases", "qwen3", "phi3", "gpt2", "gpt-neox", "opt", "mixtral-eager", "mixtral-grouped_mm",
    "mixtral-batched_mm", "gpt-oss-eager", "gpt-oss-grouped_mm", "gpt-oss-batched_mm", "qwen3-moe-grouped_mm",
)  # fmt: skip


def build(kind: str) -> Any:
    """A transformers causal LM with random weights and biases; equal on every call."""
    import transformers as hf

    name, _, implementation = kind.rpartition("-") if kind not in _SIZES else (kind, "", "")
    config = hf.AutoConfig.for_model(_TYPES.get(name, name), **_SIZES[name])
    if implementation:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))


def lm_loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch, labels=batch).loss


class Mlp(nn.Module):
    """An MLP as users may write it: `up` computes the hidden units and `down` uses them."""

    def __init__(self, d: int = 6, h: int = 24, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, h, bias=bias), nn.Linear(h, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class MlpNet(Net):
    """Input layer, MLPs, output layer."""

    make_block = Mlp

    def __init__(self, d: int = 6, h: int = 24) -> None:
        super().__init__(2, d, h)


MLPS = [sliced_layer(Mlp, kind="mlp", rows=["up"], columns=["down"])]


def plain_net() -> MlpNet:
    torch.manual_seed(0)
    return MlpNet()


def partial_net(slice_index: int, num_slices: int = 4) -> nn.Module:
    return partial_updates(plain_net(), slice_index=slice_index, num_slices=num_slices, include=["mlp"], patterns=MLPS)


def active_mask(model: nn.Module) -> dict[str, Tensor]:
    """Return the mask of trained coordinates for every parameter of the unsliced model."""
    return unslice(model, lambda parameter: torch.full(parameter.shape, parameter.requires_grad))


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients with the names and shapes of the unsliced model; zero where frozen."""
    return unslice(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


def unslice(model: nn.Module, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Return what `value_of` gives for each parameter, by the names of the unsliced model."""
    values = {name: value_of(parameter) for name, parameter in model.named_parameters()}
    for name, sliced in sliced_parameters(model).items():
        prefix = name.removesuffix(sliced.name)
        values[name] = sliced.join([values.pop(prefix + part) for part in sliced.part_names])
    return values
