"""Llama models with random weights, from transformers or, if it is not installed, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of a Llama, and of the batches that train it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    sequence: int

    def __str__(self) -> str:
        return (
            f"Llama {self.hidden}/{self.intermediate} x {self.layers} layers, vocabulary {self.vocab}, "
            f"{self.batch} x {self.sequence} tokens"
        )

    def build(self, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> nn.Module:
        """Build the model; equal seeds and devices give equal weights."""
        torch.manual_seed(seed)
        with device:
            model = self._from_transformers() or PlainLlama(self)
        return model.to(dtype).train()

    def _from_transformers(self) -> nn.Module | None:
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError:
            return None
        config = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocab,
            max_position_embeddings=max(2048, self.sequence), tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def tokens(self, device: torch.device, *, seed: int) -> Tensor:
        """Return a batch of random tokens, the same on every device. The host does not wait for the device."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocab, (self.batch, self.sequence), generator=generator)
        return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens.to(device)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that become units; call it before sharding changes their classes."""
    return [m for m in model.modules() if type(m).__name__ in ("LlamaDecoderLayer", "PlainLayer")]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the next-token loss of a batch."""
    return model(input_ids=tokens, labels=tokens)["loss"]


class RMSNorm(nn.Module):
    """Normalisation by the root mean square."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class PlainLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.hidden // shape.heads
        kv = self.kv_heads * self.size
        self.q, self.k, self.v, self.o = (
            nn.Linear(shape.hidden, out, bias=False) for out in (shape.hidden, kv, kv, shape.hidden)
        )
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.before_attention, self.before_mlp = RMSNorm(shape.hidden), RMSNorm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (
            projection(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """The architecture of transformers' Llama in plain torch, with the same call."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.size = shape.hidden // shape.heads
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(PlainLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids)
        cos, sin = self._angles(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    def _angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = 10_000.0 ** (-torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), frequencies).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
