"""The compute and the activations of a transformer by formula, for models that cannot be traced.

[Note: A transformer by formula]
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4: a
layer keeps s b h (34 + 5 a s / h) bytes in 16 bits (equation 1), with s tokens in each of b rows, hidden size h and a
attention heads. Kernels that do not keep attention's matrix keep 34 s b h, as under the paper's selective
recomputation. A recomputed layer keeps its input, 2 s b h. The loss keeps logits in 32 bits, 4 s b v, for v tokens of
the vocabulary, and has their gradient beside them. Other widths scale these bytes. A product takes 2 FLOPs for each
weight and token forward, as many for the gradient of its input, and as many again for that of a weight that trains;
attention takes 2 s^2 b h more in a causal forward and twice that backward. A layer reads its weights and moves what it
keeps through memory twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from laconic.layers.linear import quantized_layers
from laconic.plan.equal_layers import Run
from laconic.plan.phase import LayerInput, Operations, Phase

SOURCE = "Korthikanti et al., arXiv 2205.05198, equation 1"
_BYTES_PER_TOKEN = 34
"""The bytes that a layer keeps per token and hidden feature, in 16 bits."""


def formula_run(
    model: nn.Module, layers: Sequence[nn.Module], *, rows: int, tokens: int, compute_dtype: torch.dtype | None
) -> tuple[Run, LayerInput]:
    """The phases of one micro-batch, and the hidden states between two layers: [Note: A transformer by formula].

    Unit i is layer i, and the last is the root.

    Raises:
        ValueError: the model has no layers, or its configuration lacks a size that the formula needs.
    """
    sizes = _sizes(model, layers)
    hidden, heads, vocabulary = sizes["hidden_size"], sizes["num_attention_heads"], sizes["vocab_size"]
    dtype = compute_dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    name, itemsize = str(dtype).removeprefix("torch."), dtype.itemsize
    total = rows * tokens
    config: Any = model.config
    keeps_matrix = getattr(config, "_attn_implementation", "eager") == "eager"
    matrix_bytes = 5 * heads * tokens / hidden if keeps_matrix else 0
    kept = int(total * hidden * (_BYTES_PER_TOKEN + matrix_bytes) * itemsize / 2)
    input_bytes = total * hidden * itemsize
    is_recomputed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    attention = 2.0 * total * tokens * hidden
    share = _share_of_experts(config)

    def phase(flops: float, weights: float, moved: int, peak: int, end: int) -> Phase:
        work = Operations(dtype=name, flops=flops, memory_bytes=weights * itemsize + 2.0 * moved, count=1)
        return Phase(work=(work,), peak_bytes=peak, end_bytes=end, peak_with_gradients_bytes=peak)

    forward, backward = [], []
    for unit, layer in enumerate(layers):
        weights, trained = _weights(layer, share)
        flops = 2.0 * total * weights + attention
        gradients = 2.0 * total * (weights + trained) + 2 * attention + (flops if is_recomputed else 0)
        rest = input_bytes if is_recomputed else kept
        forward.append((unit, False, phase(flops, weights, kept, kept, rest)))
        peak = (kept if is_recomputed else 0) + 2 * input_bytes
        backward.append((unit, True, phase(gradients, 2 * weights, 2 * kept, peak, -rest)))
    root, head = len(layers), float(hidden * vocabulary)
    own = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    head_trains = float(any(parameter.requires_grad for parameter in own if parameter.shape[0] == vocabulary))
    logits = total * vocabulary
    logits_bytes = logits * (itemsize + (4 if itemsize < 4 else 0)) + input_bytes
    embedding = phase(0.0, 0.0, input_bytes, input_bytes, input_bytes)
    loss = phase(2.0 * total * head, head, logits_bytes, logits_bytes + 4 * logits, logits_bytes)
    last = phase(2.0 * total * head * (1 + head_trains), 2 * head, logits_bytes, 4 * logits, -logits_bytes)
    done = phase(0.0, 0.0, input_bytes, 0, -input_bytes)
    run = [
        (root, False, embedding), *forward, (root, False, loss), (root, True, last), *reversed(backward),
        (root, True, done),
    ]  # fmt: skip
    return run, LayerInput(nbytes=input_bytes, requires_grad=True)


def _sizes(model: nn.Module, layers: Sequence[nn.Module]) -> Mapping[str, int]:
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    names = ("hidden_size", "num_attention_heads", "vocab_size")
    found = {name: getattr(config, name, None) for name in names}
    missing = [name for name, value in found.items() if not isinstance(value, int)]
    if missing or not layers:
        raise ValueError(
            f"there is no formula for {type(model).__name__}: "
            + (f"its config has no {', '.join(missing)}" if missing else "it has no layers; give them as units")
        )
    return {name: value for name, value in found.items() if value is not None}


def _weights(layer: nn.Module, share_of_experts: float) -> tuple[float, float]:
    """The weights of a layer's products per token, and those that train."""
    weights = trained = 0.0
    for coded in quantized_layers(layer):
        weights += coded.in_features * coded.out_features
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            numel = parameter.numel() * (share_of_experts if parameter.ndim == 3 else 1.0)
            weights += numel
            trained += numel if parameter.requires_grad else 0.0
    return weights, trained


def _share_of_experts(config: Any) -> float:
    """The share of a mixture's experts that a token goes through."""
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((value for name in names if (value := getattr(config, name, None))), None)
    return chosen / experts if chosen and experts else 1.0
