"""Bytes saved for backward over one step of real models, from transformers' configurations, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.cyclic.stages.meter import Trace, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A model and what its reduction must be; one sample of its usual size, fp32."""

    name: str
    required: float | None
    """Share of the total peak that 32 staggered workers save at least; None: reported only."""
    build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
    """The model, and its loss."""

    def trace(self) -> Trace:
        """Bytes over one forward and backward of one worker."""
        torch.manual_seed(0)
        return trace(*self.build())


def _resnet50() -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _classifier(ResNetForImageClassification(ResNetConfig(num_labels=1000)))


def _vit_b16() -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    return _classifier(ViTForImageClassification(ViTConfig(num_labels=1000)))


def _classifier(model: nn.Module) -> tuple[nn.Module, Callable[[], Tensor]]:
    image, label = torch.randn(1, 3, 224, 224), torch.tensor([0])
    return model.train(), lambda: functional.cross_entropy(model(pixel_values=image).logits, label)


def _llama(layers: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=32_000,
        tie_word_embeddings=False,
    )
    model, tokens = LlamaForCausalLM(config).train(), torch.randint(32_000, (1, 1024))
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


MODELS = (
    Traced(name="ResNet-50", required=0.28, build=_resnet50),
    Traced(name="ViT-B/16", required=0.45, build=_vit_b16),
    Traced(name="Llama 768 x 12 layers", required=None, build=lambda: _llama(12)),
)
"""Images of 224 x 224, a sequence of 1024 tokens."""
