"""LoRA and DoRA by peft: adapters train and all other parameters are frozen. The model may be on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laconic.errors import JobError
from laconic.hf.layers import has_adapters
from laconic.layers.linear import QuantizedLinear

if TYPE_CHECKING:  # publishing needs torch alone, and the description of a job needs pydantic
    from laconic.config import LoraConfig

ADAPTER = "default"


def add_adapters(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put adapters around the linear layers of a transformers causal LM, in place. On meta, adapters have no values.

    Without `lora.targets` every linear layer but the output layer gets an adapter. peft's "all-linear" would adapt a
    mixture's fused experts too: peft swaps their parameters in forward, but a sharded parameter must stay in place.

    Raises:
        JobError: `lora.targets` names no linear layer of the model.
    """
    import peft

    linear = {name.rpartition(".")[2]: module for name, module in model.named_modules() if _is_linear(module)}
    output = model.get_output_embeddings()  # type: ignore[operator]
    targets = config.targets or tuple(sorted(name for name, module in linear.items() if module is not output))
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by r, any number will do
        lora_dropout=config.dropout,
        use_dora=config.dora,
        target_modules=list(targets),
    )
    device = next(model.parameters()).device
    with warnings.catch_warnings(), device:
        # GPT-2's Conv1D stores its weight transposed. peft notices this, sets fan_in_fan_out and warns.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        # Releases of peft and transformers differ: in names of attributes, and in patterns that a model does not need.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        try:
            return peft.get_peft_model(model, lora)
        except ValueError as error:
            raise JobError(
                f"lora.targets = {list(targets)} fits no layer of {type(model).__name__} ({error}); "
                f"its linear layers are {', '.join(sorted(linear))}"
            ) from error


def adapted_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield (parent, name in the parent, layer) for every layer that has an adapter."""
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, BaseTunerLayer):
                yield parent, name, layer


@contextmanager
def adapters_put_aside(model: nn.Module) -> Iterator[None]:
    """Show the base model without adapters inside the `with` block, so that its parameters have their own names."""
    layers = list(adapted_layers(model))
    try:
        for parent, name, layer in layers:
            parent._modules[name] = layer.get_base_layer()  # peft may have wrapped it several times
        yield
    finally:
        for parent, name, layer in layers:
            parent._modules[name] = layer


def adapter_modules(layer: Any) -> list[nn.Module]:
    """Return the modules that peft has added to a layer."""
    base = {id(module) for module in layer.base_layer.modules()}
    return [module for module in layer.modules() if id(module) not in base]


def reset_adapters(layer: Any, norms: Tensor | None = None) -> None:
    """Initialise one layer's adapter as peft does: A random, B zero, and with DoRA the magnitudes `norms`."""
    layer.reset_lora_parameters(ADAPTER, True)
    if norms is not None:
        layer.lora_magnitude_vector[ADAPTER].weight.data.copy_(norms)


def is_dora(layer: Any) -> bool:
    """True if the adapter of a layer has DoRA's magnitudes (arXiv 2402.09353)."""
    return ADAPTER in getattr(layer, "lora_magnitude_vector", {})


@torch.no_grad()
def row_norms(layer: Any) -> Tensor:
    """The norms, (out_features,), of the rows of an adapted layer's own weight, which DoRA starts from. Collective.

    Memory: the whole weight, which may be sharded or in few bits.
    """
    base = layer.get_base_layer()
    if isinstance(base, QuantizedLinear):
        weight = base.decode(gathered(base.weight_codes), gathered(base.weight_scales), base.dtype)
    else:
        weight = gathered(base.weight)
    if getattr(layer, "fan_in_fan_out", False):  # GPT-2's Conv1D
        weight = weight.T
    return torch.linalg.vector_norm(weight.float(), dim=1).to(weight.dtype)


def gathered(parameter: Any) -> Tensor:
    """All of a parameter, sharded or not. Collective."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
