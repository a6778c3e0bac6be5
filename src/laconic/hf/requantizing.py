"""Quantise tensors of a transformers model anew, by the quantiser that `from_pretrained` has used.

[Note: Requantising]
transformers quantises a tensor while it loads: the library's operation gets the whole tensor and a model whose modules
are ready for it and have no weights yet. A loaded model is that no more: torchao's modules already hold quantised
tensors, and bitsandbytes' parameters say that they are. So a `Requantizer` makes the model once more without memory,
lets a copy of the quantiser prepare it as `from_pretrained` does, and gives the operation that one. What comes out are
the tensors of the loaded model. So every method that quantises on the fly is that of its library.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import state
from laconic.errors import JobError


class Requantizer:
    """Quantises whole tensors as a model's own were: [Note: Requantising].

    Raises:
        JobError: the method needs calibration, or is not of transformers 5.
    """

    def __init__(self, model: Any) -> None:
        quantizer = copy.deepcopy(model.hf_quantizer)
        method = quantizer.quantization_config.quant_method
        self.method = str(getattr(method, "value", method))
        """The name of the method, as in `quantization_config`."""
        if quantizer.requires_calibration or not hasattr(quantizer, "get_quantize_ops"):
            raise JobError(
                f"the model is quantised by {self.method}, which transformers cannot do anew; serve it plain, or with "
                "a method that quantises on the fly, such as torchao"
            )
        quantizer.pre_quantized = False
        self.dtype: torch.dtype = getattr(model.config, "dtype", None) or torch.get_default_dtype()
        """The dtype of tensors before they are quantised."""
        self.plain = _without_memory(model, self.dtype)
        """The model without memory, whose modules are ready for the quantiser."""
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.shown_tensors(self.plain).items()}
        """The shapes of all tensors before they are quantised, by name; tied ones once."""
        quantizer.preprocess_model(model=self.plain, dtype=self.dtype, device_map=None, checkpoint_files=None)
        self._quantizer = quantizer
        self.names = frozenset(name for name in self.shapes if self._is_quantized(name))
        """The names of the tensors that are quantised."""

    def quantize(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Quantise a tensor. Returns the model's tensors for it, such as codes and scales, by name.

        Shapes: values as `shapes` has it, in `dtype`, on the device of the model's tensor.

        Raises: whatever the library does.
        """
        parent = name.rpartition(".")[0]
        module = self.plain.get_submodule(parent)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        try:
            found: dict[str, Any] = self._quantizer.get_quantize_ops().convert(
                {name: [values]},
                source_patterns=[name],
                target_patterns=[name],
                full_layer_name=name,
                model=self.plain,
                config=self.plain.config,
                missing_keys=set(),
            )
            after = module._parameters | module._buffers  # torchao writes into the module
            for key, tensor in after.items():
                if tensor is not None and tensor is not parameters.get(key) and tensor is not buffers.get(key):
                    found[f"{parent}.{key}" if parent else key] = tensor
        finally:
            _restore(module._parameters, parameters)
            _restore(module._buffers, buffers)
        return {key: each[0] if isinstance(each, list) else each for key, each in found.items()}

    def _is_quantized(self, name: str) -> bool:
        with contextlib.suppress(AttributeError):  # the prepared modules have no such tensor
            return bool(self._quantizer.param_needs_quantization(self.plain, name))
        return False


def _restore(held: dict[str, Any], before: dict[str, Any]) -> None:
    held.clear()
    held.update(before)


def _without_memory(model: Any, dtype: torch.dtype) -> Any:
    """The model as its configuration says, on the meta device."""
    config, default = copy.deepcopy(model.config), torch.get_default_dtype()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            made: nn.Module = type(model)(config)
    finally:
        torch.set_default_dtype(default)
    return made
