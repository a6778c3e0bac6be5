"""The tensors of a model under the names of its checkpoint, each as this rank holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.codec.linear import quantized_layers
from laconic.hf.saving import adapter_tensors, is_peft_model
from laconic.islands.local_steps import LocalSteps
from laconic.publish.versions import Names, PublishError
from laconic.ragged.parts import joined


def checkpoint_tensors(
    model: nn.Module, names: Names = "huggingface", local_steps: LocalSteps | None = None
) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers, tied ones once, under their names in a checkpoint.

    Sliced parameters are joined. With `local_steps` the parameters are those that islands have last agreed on. A model
    of peft has its adapters only, unless `names` is "model". Units are resharded; nothing is gathered, and the next
    crossings stay as they are.

    Raises:
        PublishError: weights rest in few bits, which no checkpoint of the model has.
    """
    state.show_sharded(model)
    tensors = state.shown_tensors(model)
    if local_steps is not None:
        agreed = {
            state.strip(name): part
            for fragment in local_steps.fragments
            for name, part in fragment.named(fragment.flat).items()
        }
        tensors = {name: agreed[name].to(t.dtype) if name in agreed else t for name, t in tensors.items()}
    tensors = joined(tensors, state.places(model))
    if names == "huggingface" and is_peft_model(model):
        return _adapters(model, tensors)
    if names == "huggingface" and any(quantized_layers(model)):
        raise PublishError(
            "the model has weights in few bits, which its checkpoint would have decoded; publish the adapters of a "
            'peft model, or the codes with names="model"'
        )
    return tensors


def _adapters(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all adapters, under their names in peft's files; of others than the first with their own name."""
    found: dict[str, Tensor] = {}
    for adapter in model.peft_config:
        prefix = "" if adapter == "default" else f"{adapter}/"
        own = adapter_tensors(model, tensors, adapter, save_embedding_layers=False)
        found |= {prefix + name: tensor for name, tensor in own.items()}
    return found


def buffer_names(model: nn.Module) -> set[str]:
    """The names of persistent buffers, which may differ from rank to rank."""
    return {state.strip(name) for name, _ in state.persistent_buffers(model)}
