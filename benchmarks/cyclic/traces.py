"""The row about the bytes that real models save for backward. The models are from transformers, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.activation_trace import Trace, trace
from benchmarks.cyclic.bench import BENCHMARK, Bench
from tests.support.record import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model in fp32 with one sample of its usual size, and the reduction that it must reach."""

    name: str
    required: float | None
    """The fraction of the total peak that 8 and 32 staggered workers must save; None: the row only reports it."""
    build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
    """The function that makes the model, and a function that returns its loss."""

    def trace(self) -> Trace:
        """Return the bytes over one forward and backward of one worker."""
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
    TracedModel(name="ResNet-50", required=0.28, build=_resnet50),
    TracedModel(name="ViT-B/16", required=0.45, build=_vit_b16),
    TracedModel(name="Llama 768 x 12 layers", required=None, build=lambda: _llama(12)),
)
"""The models of the row, with images of 224 x 224 and a sequence of 1024 tokens."""


@BENCHMARK.row("bytes")
def traced_bytes(bench: Bench) -> Row:
    measured, notes, is_met = [], [], True
    for model in MODELS:
        found = model.trace()
        reductions = [found.reduction(num_workers) for num_workers in (8, 32)]
        is_met &= model.required is None or min(reductions) >= model.required
        measured.append(f"{model.name} {' / '.join(f'{reduction:.1%}' for reduction in reductions)}")
        notes.append(
            f"{model.name}: {found.peak_bytes / 2**20:.1f} MiB a worker at its peak, limit "
            f"{1 - found.mean_bytes / found.peak_bytes:.1%}"
        )
    return Row(
        claim="total peak of bytes saved for backward, N = 8 / 32, against all at once",
        required="; ".join(
            f"{model.name} {'reported' if model.required is None else f'-{model.required:.0%}'}" for model in MODELS
        ),
        measured="; ".join(measured),
        is_met=is_met,
        note=(
            f"{'; '.join(notes)}. Traced on one worker, fp32, one sample (224 x 224; 1024 tokens): unique storages "
            "without parameters, time by FLOPs, the exact maximum over time of the staggered sum."
        ),
    )
