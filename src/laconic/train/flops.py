"""Model FLOP/s utilisation (MFU): the share of the devices' FLOP/s that the model's own arithmetic takes.

Source: PaLM (arXiv 2204.02311, appendix B). Recomputation for activation checkpointing does not count.
"""

import re
from typing import Any

import torch
from torch import nn

from laconic.codec.linear import quantized_layers
from laconic.hf.layers import base_model

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}
"""Dense FLOP/s with 16-bit inputs by words of the device's name, from the makers' data sheets."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The FLOP/s that a device can do in a 16-bit `dtype`; None for another type, or a device that is not known."""
    if device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """The FLOPs of forward and backward per token; None for a mixture of experts, which uses a part of its weights.

    A multiplication by a weight takes 2 FLOPs in forward, 2 for the gradient of the input and, if the weight trains, 2
    for its own. Attention takes 12 times layers x hidden size x tokens. Looking up an embedding takes none.
    """
    base: Any = base_model(model)
    text: Any = base.config.get_text_config()
    if any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    coded = {id(p): 0 for layer in quantized_layers(model) for p in (layer.weight_codes, layer.weight_scales)}
    embedding = base.get_input_embeddings().weight
    output = base.get_output_embeddings()
    if output is not None and output.weight is not embedding:
        coded[id(embedding)] = 0
    total = 4.0 * sum(layer.in_features * layer.out_features for layer in quantized_layers(model))
    for parameter in model.parameters():
        total += coded.get(id(parameter), parameter.numel()) * (6 if parameter.requires_grad else 4)
    return total + 12.0 * text.num_hidden_layers * text.hidden_size * sequence_length
