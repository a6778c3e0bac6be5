"""The tensors of a model under the names of its checkpoint, each as this rank holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.checkpoint import state
from laconic.hf.hub_names import FolderRun, runs_of_folder
from laconic.hf.layers import base_model
from laconic.hf.lora import adapted_layers, adapters_put_aside
from laconic.hf.saving import adapter_tensors, is_peft_model
from laconic.islands.local_steps import LocalSteps
from laconic.layers.linear import quantized_layers
from laconic.publish.regions import Addends
from laconic.publish.versions import Names, PublishError
from laconic.ragged.parts import joined


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The tensors of a checkpoint, as this rank holds them."""

    tensors: dict[str, Tensor]
    buffers: frozenset[str] = frozenset()
    """The names of buffers, which may differ from rank to rank."""
    addends: Mapping[str, Addends] = field(default_factory=dict)
    """The products of adapters to add to some tensors, by the tensors' names."""
    model: nn.Module | None = None
    """The model whose names those are, if folders of the hub may have others."""


def contents_of(
    model: nn.Module,
    names: Names,
    *,
    merges: bool = False,
    leaves_codes: bool = False,
    local_steps: LocalSteps | None = None,
) -> CheckpointContents:
    """Find the parameters and persistent buffers, tied ones once, under their names in a checkpoint.

    Sliced parameters are joined. With `local_steps` the parameters are those that islands have last agreed on. A model
    of peft has its adapters only, unless `names` is "model" or it `merges`. Units are resharded; no weight is gathered,
    and the next crossings stay as they are. Collective if it `merges`.

    Raises:
        PublishError: weights rest in few bits, which no checkpoint of the model has, and it does not leave their codes
            as they are; or there is nothing to merge.
    """
    state.show_sharded(model)
    if merges:
        return _merged(model)
    tensors = state.shown_tensors(model)
    if local_steps is not None:
        agreed = {
            state.strip(name): part
            for fragment in local_steps.fragments
            for name, part in fragment.named(fragment.flat).items()
        }
        tensors = {name: agreed[name].to(t.dtype) if name in agreed else t for name, t in tensors.items()}
    tensors = joined(tensors, state.places(model))
    if names != "model" and is_peft_model(model):
        return CheckpointContents(tensors=_adapters(model, tensors))
    if names != "model" and not leaves_codes and any(quantized_layers(model)):
        raise PublishError(
            "the model has weights in few bits, which its checkpoint would have decoded; publish the adapters of a "
            'peft model, or the codes with names="model"'
        )
    return CheckpointContents(tensors=tensors, buffers=_buffers(model), model=model)


def _buffers(model: nn.Module) -> frozenset[str]:
    return frozenset(state.strip(name) for name, _ in state.persistent_buffers(model))


def _adapters(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all adapters, under their names in peft's files; of others than the first with their own name."""
    found: dict[str, Tensor] = {}
    for adapter in model.peft_config:
        prefix = "" if adapter == "default" else f"{adapter}/"
        own = adapter_tensors(model, tensors, adapter, save_embedding_layers=False)
        found |= {prefix + name: tensor for name, tensor in own.items()}
    return found


def _merged(model: nn.Module) -> CheckpointContents:
    """The tensors of a peft model's base model, and what its adapters add to some of them. Collective.

    Each rank makes the product of one adapter at a time, as peft merges it. Nothing is merged in the model. Products
    are made on the host, as `laconic export` makes them: a GPU rounds them otherwise, and has less room.
    Cost: host memory for both factors of all adapters on every rank, and for one product at a time.
    """
    if not is_peft_model(model):
        raise PublishError(f'{type(model).__name__} has no adapters of peft to merge; leave adapters="merged" out')
    addends: dict[int, Addends] = {}
    for _, name, layer in adapted_layers(model):
        base = layer.get_base_layer()
        if any(quantized_layers(base)):
            raise PublishError(f"{name} has weights in few bits, and no adapter is merged into them; publish it alone")
        factors = {adapter: _factors_of(name, layer, adapter) for adapter in layer.active_adapters}
        addends[id(base.weight)] = partial(_products, layer, factors)
    with adapters_put_aside(model):
        inner = base_model(model)
        return CheckpointContents(
            tensors=joined(state.shown_tensors(inner), state.places(inner)),
            buffers=_buffers(inner),
            addends={name: addends[id(p)] for name, p in state.named_parameters(inner).items() if id(p) in addends},
            model=inner,
        )


def _factors_of(name: str, layer: Any, adapter: str) -> list[tuple[nn.Module, Tensor]]:
    """The modules of both factors of an adapter, with their whole weights."""
    is_plain = hasattr(layer, "lora_A") and adapter in layer.lora_A and adapter not in layer.lora_variant
    if not is_plain or layer.lora_bias[adapter]:
        raise PublishError(
            f"the adapter {adapter!r} of {name} is more than a product of two matrices, such as DoRA; publish adapters "
            "alone, and merge them by peft"
        )
    factors: list[tuple[nn.Module, Any]] = [
        (each[adapter], each[adapter].weight) for each in (layer.lora_A, layer.lora_B)
    ]
    wholes = [(module, w.full_tensor() if isinstance(w, DTensor) else w.detach()) for module, w in factors]
    return [(module, whole.cpu()) for module, whole in wholes]


def _products(layer: Any, factors: Mapping[str, list[tuple[nn.Module, Tensor]]]) -> Iterator[Tensor]:
    """Yield what peft adds to the weight of a layer for each of its adapters."""
    for adapter, wholes in factors.items():
        kept = [(module, module._parameters["weight"]) for module, _ in wholes]
        try:
            for module, whole in wholes:
                module._parameters["weight"] = nn.Parameter(whole, requires_grad=False)
            yield layer.get_delta_weight(adapter)
        finally:
            for module, parameter in kept:
                module._parameters["weight"] = parameter


def in_folder(contents: CheckpointContents, names: Names) -> dict[str, FolderRun]:
    """Where the tensors of a folder lie in those of a checkpoint, by their names in the folder.

    Raises:
        JobError: see `runs_of_folder`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in contents.tensors.items()}
    if names != "hub" or contents.model is None:
        return {name: FolderRun(name, 0, shape) for name, shape in shapes.items()}
    return runs_of_folder(contents.model, shapes)
