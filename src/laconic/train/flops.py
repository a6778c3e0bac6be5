"""Model FLOP/s utilisation (MFU): the share of the devices' FLOP/s that the model's own arithmetic takes.

Source: PaLM (arXiv 2204.02311, appendix B). Recomputation for activation checkpointing does not count.
"""

from typing import Any

import torch
from torch import nn

from laconic.codec.linear import quantized_layers
from laconic.hf.layers import base_model
from laconic.plan.known import device_of
from laconic.strategies.memory import whole_numel


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The FLOP/s that a device can do in a 16-bit `dtype`; None for another type, or a device that is not known."""
    return peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_of(torch_name: str, dtype: str) -> float | None:
    """As `peak_flops`, for the device of this name in torch. The figures are those of plan/devices.toml."""
    known = device_of(torch_name)
    return known.peak_flops_per_s.get(dtype) if known and dtype in ("bfloat16", "float16") else None


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """The FLOPs of forward and backward per token; None for a mixture of experts, which uses a part of its weights.

    A multiplication by a weight takes 2 FLOPs in forward, 2 for the gradient of the input and, if the weight trains, 2
    for its own. Attention takes 12 times layers x hidden size x tokens. Looking up an embedding takes none.
    """
    base: Any = base_model(model)
    text: Any = base.config.get_text_config()
    if any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    quantized = list(quantized_layers(model))
    coded = {id(p): 0 for layer in quantized for p in (layer.weight_codes, layer.weight_scales)}
    embedding = base.get_input_embeddings().weight
    output = base.get_output_embeddings()
    if output is not None and (output in quantized or output.weight is not embedding):
        coded[id(embedding)] = 0
    total = 4.0 * sum(layer.in_features * layer.out_features for layer in quantized)
    for parameter in model.parameters():
        total += coded.get(id(parameter), whole_numel(parameter)) * (6 if parameter.requires_grad else 4)
    return total + 12.0 * text.num_hidden_layers * text.hidden_size * sequence_length
