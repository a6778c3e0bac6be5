"""What partial updates save on a model of 1.3 B parameters, counted on the meta device: FLOPs and bytes of one step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from laconic.partial.patterns import Kind
from laconic.partial.updates import partial_updates

Shape = Literal["gpt2", "llama"]
HIDDEN, LAYERS, HEADS, VOCAB = 2048, 24, 16, 32_000


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of one step with AdamW, all of it in fp32."""

    flops: int
    """Forward and backward, as torch's flop counter has them."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """What the graph keeps between forward and backward; parameters not counted."""

    @property
    def peak_bytes(self) -> int:
        """All of it at once, as in the last micro-batch of an accumulated step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def step_cost(
    shape: Shape,
    *,
    slices: int = 1,
    include: Collection[Kind] = ("mlp", "attention"),
    batch: int = 1,
    sequence: int = 1024,
    checkpointing: bool = False,
) -> StepCost:
    """Count one step of a model of 1.3 B parameters; no memory is used."""
    with torch.device("meta"):
        model = _model(shape, sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        # given whole: transformers would read a mask's values to find out whether it is causal
        mask = torch.zeros(batch, 1, sequence, sequence, dtype=torch.bool)
    partial_updates(model, slice=0, slices=slices, include=include)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = _Kept(model)
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            logits = model(tokens, attention_mask=mask, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert gradients == sum(p.nbytes for p in trained)
    return StepCost(
        flops=counter.get_total_flops(),
        weights_bytes=sum(p.nbytes for p in model.parameters()),
        gradients_bytes=gradients,
        optimizer_bytes=2 * gradients,  # AdamW's two moments
        activations_bytes=kept.nbytes,
    )


class _Kept:
    """Storages that a graph keeps, each once; they are held, so that none can take another's place."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def _model(shape: Shape, sequence: int) -> Any:
    import transformers as hf

    if shape == "gpt2":  # an MLP of 4 d without a gate; as many heads of keys as of queries
        sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": sequence}
        without_dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        config: Any = hf.GPT2Config(
            **sizes,
            **without_dropout,
            activation_function="gelu",
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return hf.GPT2LMHeadModel(config)
    config = hf.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=5504,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
    )
    return hf.LlamaForCausalLM(config)


def main() -> None:
    """Print the table."""
    kinds: tuple[tuple[str, tuple[Kind, ...]], ...] = (("MLP", ("mlp",)), ("MLP + attention", ("mlp", "attention")))
    for shape in ("gpt2", "llama"):
        for setting in ({}, {"checkpointing": True}, {"batch": 2}):
            full = step_cost(shape, **setting)  # type: ignore[arg-type]
            print(f"{shape} {setting}: {full.flops / 1e12:.2f} TFLOP, {full.peak_bytes / 1e9:.2f} GB")
            for name, include in kinds:
                part = step_cost(shape, slices=4, include=include, **setting)  # type: ignore[arg-type]
                print(
                    f"  1/4 of {name}: FLOPs {part.flops / full.flops - 1:+.2%}, peak "
                    f"{part.peak_bytes / full.peak_bytes - 1:+.2%} ({part.peak_bytes / 1e9:.2f} GB), activations "
                    f"{full.activations_bytes / 1e9:.2f} -> {part.activations_bytes / 1e9:.2f} GB"
                )


if __name__ == "__main__":
    main()
