"""Rows about partial updates: the FLOPs and the memory of one training step of a 1.3 B model, on the meta device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.local_steps.bench import BENCHMARK, Bench
from laconic.partial.patterns import SLICED_BY_DEFAULT, Kind
from laconic.partial.updates import partial_updates
from tests.support.record import Row

HIDDEN, LAYERS, HEADS, VOCAB = 2048, 24, 16, 32_000
_SEQUENCE = 1024


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of one step with AdamW. Weights, gradients, states and activations are in fp32."""

    flops: int
    """The operations of forward and backward, as torch's flop counter counts them."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """The tensors that autograd keeps between forward and backward, without parameters."""

    @property
    def peak_bytes(self) -> int:
        """The sum of all four, as in the last micro-batch of an accumulated step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


@cache
def step_cost(*, slices: int = 1, include: Collection[Kind] = SLICED_BY_DEFAULT, batch: int = 1) -> StepCost:
    """Return the cost of one step of a model of 1.3 B parameters in slices, without allocating its tensors."""
    model = _gpt2()
    with torch.device("meta"):
        tokens = torch.zeros(batch, _SEQUENCE, dtype=torch.long)
        # A mask of all pairs. transformers would read the values of a smaller mask, and a meta tensor has no values.
        mask = torch.zeros(batch, 1, _SEQUENCE, _SEQUENCE, dtype=torch.bool)
    partial_updates(model, slice_index=0, num_slices=slices, include=include)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    saved = _SavedStorages(model)
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
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
        activations_bytes=saved.nbytes,
    )


class _SavedStorages:
    """The storages that autograd saves. This object keeps them alive, so no two of them share an address."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Note the storage of a saved tensor, unless it is a parameter's; return the tensor unchanged."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        """The bytes of all noted storages."""
        return sum(storage.nbytes() for storage in self._storages.values())


def _gpt2() -> Any:
    """A GPT-2: an MLP of 4 d without a gate, and as many heads of keys as of queries."""
    import transformers as hf

    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": _SEQUENCE}
    without_dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config: Any = hf.GPT2Config(
        **sizes, **without_dropout, activation_function="gelu", tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        return hf.GPT2LMHeadModel(config)


@BENCHMARK.row("flops")
def flops(bench: Bench) -> Row:
    return _row(
        "flops",
        claim="training FLOPs (torch's flop counter) of 1/2, 1/4 and 1/8 of MLPs, 1.3B-like shapes",
        note=(
            "GPT-2-like, d = 2048, 24 layers, untied vocabulary of 32,000, 1 x 1024 tokens; forward and backward. "
            "Frozen units skip the gradient of their weights, a third of their products, so half of the MLPs cannot "
            "save more than 10.1 %: 12 % is out of its reach while gradients of inputs are exact."
        ),
    )


@BENCHMARK.row("memory")
def memory(bench: Bench) -> Row:
    larger = " / ".join(f"{value:+.1%}" for value in _savings("peak_bytes", batch=2))
    return _row(
        "peak_bytes",
        claim="peak of weights + gradients + optimizer + saved activations, same",
        note=(
            "AdamW, all in fp32, counted on the meta device; outer parameters and momentum rest in host memory. With a "
            f"batch of 2, where activations weigh more, {larger}."
        ),
    )


_SLICES = (2, 4, 8)


def _row(quantity: str, *, claim: str, note: str) -> Row:
    found, heads = _savings(quantity), _savings(quantity, include=("mlp", "attention"))
    return Row(
        claim=claim,
        measured=" / ".join(f"{value:+.2%}" for value in found),
        note=f"{note} With as many slices of heads, too: {' / '.join(f'{value:+.2%}' for value in heads)}.",
    )


def _savings(quantity: str, *, include: Collection[Kind] = SLICED_BY_DEFAULT, batch: int = 1) -> list[float]:
    full = step_cost(batch=batch)
    parts = [step_cost(slices=slices, include=include, batch=batch) for slices in _SLICES]
    return [getattr(part, quantity) / getattr(full, quantity) - 1 for part in parts]
