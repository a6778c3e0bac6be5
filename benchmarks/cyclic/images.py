"""Image models of the cyclic rows, as blocks to be called one after the other, and their input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_CLASSES = 1000


def image() -> Tensor:
    """One sample of ImageNet's size, (1, 3, 224, 224)."""
    return torch.randn(1, 3, 224, 224)


def resnet(*depths: int, layer_type: str, widest: int, channels: int = 3, classes: int = _CLASSES) -> list[nn.Module]:
    """Return the blocks of a ResNet: the first convolution, every residual block, and the classifier."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [widest >> shift for shift in (3, 2, 1, 0)]
    config = ResNetConfig(
        num_channels=channels, num_labels=classes, depths=list(depths), layer_type=layer_type, hidden_sizes=sizes
    )  # fmt: skip
    model = ResNetForImageClassification(config).train()
    layers = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
    return [model.resnet.embedder, *layers, nn.Sequential(model.resnet.pooler, model.classifier)]


def _vit_b16() -> list[nn.Module]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=_CLASSES)).train()
    layers = model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer  # transformers 5, 4
    return [model.vit.embeddings, *layers, _OfFirstToken(model.vit.layernorm, model.classifier)]


class _OfFirstToken(nn.Module):
    def __init__(self, norm: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.norm, self.classifier = norm, classifier

    def forward(self, hidden: Tensor) -> Tensor:
        return self.classifier(self.norm(hidden)[:, 0])


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "ResNet-18": lambda: resnet(2, 2, 2, 2, layer_type="basic", widest=512),
    "ResNet-50": lambda: resnet(3, 4, 6, 3, layer_type="bottleneck", widest=2048),
    "ViT-B/16": _vit_b16,
}
"""The blocks of each model, to be called one after the other."""
