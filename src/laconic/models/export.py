"""Write a checkpoint as a Hugging Face folder that transformers' `from_pretrained` loads.

One process reads the ranks' shards from disk, one output file at a time, so the model may be larger than memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import StoredCheckpoint, open_checkpoint
from laconic.checkpoint.state import persistent_buffers
from laconic.codec import WEIGHT_CODECS, BlockCodec
from laconic.comm.agreement import ranks_or_self
from laconic.config import DataConfig, JobError, LoraConfig, ModelConfig, from_dict
from laconic.errors import listing
from laconic.hf import lora
from laconic.hf.folder import (
    MAX_FILE_BYTES,
    converted,
    refuse_existing,
    whole_or_nothing,
    write_configuration,
    write_tensors,
)
from laconic.hf.layers import base_model
from laconic.models.build import build_model
from laconic.models.tokenizer import KEPT, save_tokenizer


@dataclass(frozen=True, kw_only=True)
class DecodedCheckpoint(StoredCheckpoint):
    """A `StoredCheckpoint` that decodes the weights of `QuantizedLinear`s when they are read, one at a time."""

    codec: BlockCodec
    coded: dict[str, Tensor]
    """The tensors, on meta, that are stored as codes and scales."""

    @classmethod
    def of(cls, stored: StoredCheckpoint, model: nn.Module, weight_format: str) -> DecodedCheckpoint:
        """Read `stored` for `model`, on meta, whose parameters have the names, shapes and dtypes of decoded weights."""
        coded: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if f"{name}_codes" in stored.tensors
        }
        tensors = {**stored.tensors, **{name: (tuple(p.shape), p.dtype) for name, p in coded.items()}}
        return cls(**{**vars(stored), "tensors": tensors}, codec=WEIGHT_CODECS[weight_format], coded=coded)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `StoredCheckpoint.read`."""
        names = list(names)
        plain = [name for name in names if name not in self.coded]
        return {**super().read(plain), **{name: self._decode(name) for name in names if name in self.coded}}

    def _decode(self, name: str) -> Tensor:
        parameter = self.coded[name]
        stored = super().read([f"{name}_codes", f"{name}_scales"])
        scales = stored[f"{name}_scales"].view(torch.bfloat16)
        decoded = self.codec.dequantize(stored[f"{name}_codes"], scales, parameter.numel())
        return decoded.view(parameter.shape).to(parameter.dtype)


def export(
    run: str | Path,
    out: str | Path,
    *,
    adapter: bool = False,
    dtype: torch.dtype | None = None,
    base: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> StoredCheckpoint:
    """Write the folder `out`, whole or not at all. Cost: host memory for one output file or the largest tensor.

    `run` is the output folder of a run, or one checkpoint. `adapter` writes the LoRA adapter alone; otherwise adapters
    are merged, with `lora.quantize` into the decoded weights that they were trained with. `dtype` is that of
    floating-point tensors; None keeps each tensor's own. `base` is where the run's `model.path`, or its config.json,
    lies now. A file has up to `max_file_bytes`; a larger tensor has its own file.

    Raises:
        JobError: `out` holds files already; the checkpoint is of another program or another model, or has no adapter.
        CheckpointError: there is no intact checkpoint.
    """
    run, out = Path(run), Path(out)
    refuse_existing(out)
    stored = open_checkpoint(run / "checkpoints" if (run / "checkpoints").is_dir() else run)
    model_config, lora_config, tokenizer = _job(stored, base)
    if adapter and not lora_config.enabled:
        raise JobError(f"{stored.folder} was trained without LoRA and has no adapter; leave --adapter out")
    model = build_model(model_config, replace(lora_config, quantize=None, quantize_skip=None))
    if lora_config.quantize is not None:
        stored = DecodedCheckpoint.of(stored, model, lora_config.quantize)
    whole = None if adapter else _base_tensors(model, stored)
    alone = ranks_or_self(None)
    with whole_or_nothing(out, alone) as writing:
        if whole is None:
            _write_adapter(model, stored, writing, dtype)
        else:
            tensors, value = whole
            read = partial(map, value)
            write_tensors(writing, tensors, read, dtype=dtype, max_file_bytes=max_file_bytes, ranks=alone)
            write_configuration(base_model(model), writing, dtype)
            _copy_generation_configuration(model_config, writing)
        kept = stored.folder.resolve().parents[1] / KEPT  # stored.folder is RUN/checkpoints/step-N
        save_tokenizer(str(kept) if kept.is_dir() else tokenizer, writing)
    return stored


def _job(stored: StoredCheckpoint, base: str | Path | None) -> tuple[ModelConfig, LoraConfig, str]:
    """Return the model, the adapters and the tokenizer of the job that wrote the checkpoint."""
    try:
        job = stored.extra["config"]
        moved = {"path" if "path" in job["model"] else "config": str(base)} if base else {}
        model_config = from_dict(ModelConfig, {**job["model"], **moved}, "model.")
        lora_config = from_dict(LoraConfig, job["lora"], "lora.")
        return model_config, lora_config, job["data"].get("tokenizer", DataConfig.tokenizer)
    except (KeyError, TypeError) as error:
        raise JobError(
            f"{stored.folder} was not written by laconic train: it does not say which model it has"
        ) from error


# -- the model ---------------------------------------------------------------------------------------------------------


def _base_tensors(model: nn.Module, stored: StoredCheckpoint) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the tensors of the base model by name, which are empty, and a function that reads or merges one by name.

    Raises:
        JobError: the checkpoint lacks some.
    """
    stored_as = {id(tensor): name for name, tensor in _tensors(model)}
    if missing := sorted(set(stored_as.values()) - stored.tensors.keys()):
        raise JobError(f"{stored.folder} lacks {listing(missing)}; it is a checkpoint of another model")
    adapted: dict[int, Any] = {}
    for _, _, layer in lora.adapted_layers(model):
        for parameter in layer.get_base_layer().parameters():
            adapted.setdefault(id(parameter), layer)  # the outermost wrapper, if peft has wrapped a layer several times
    with lora.adapters_put_aside(model):
        tensors = dict(_tensors(base_model(model)))

    def value(name: str) -> Tensor:
        tensor = tensors[name]
        if layer := adapted.get(id(tensor)):
            return _merged(layer, tensor, stored, stored_as)
        (found,) = stored.read([stored_as[id(tensor)]]).values()
        return found

    return tensors, value


def _merged(layer: Any, parameter: Tensor, stored: StoredCheckpoint, stored_as: dict[int, str]) -> Tensor:
    """Fill an adapted layer, let peft merge it, take `parameter`, and empty the layer."""
    slots = [(m, key, p) for m in layer.modules() for key, p in m._parameters.items() if p is not None]
    try:
        _fill([(module, key, stored_as[id(p)]) for module, key, p in slots], stored)
        wrappers = [m for m in layer.modules() if hasattr(m, "merged_adapters")]
        for wrapper in reversed(wrappers):  # the innermost first
            wrapper.merge()
            wrapper.merged_adapters.clear()
        module, key = next((m, key) for m, key, p in slots if p is parameter)
        merged: Tensor = module._parameters[key].data
        return merged
    finally:
        for module, key, p in slots:
            module._parameters[key] = p


def _fill(
    slots: Iterable[tuple[nn.Module, str, str]], stored: StoredCheckpoint, dtype: torch.dtype | None = None
) -> None:
    """Read parameters, given as (module, name in the module, name in the checkpoint), and put them in their places."""
    slots = list(slots)
    values = stored.read({name for _, _, name in slots})
    for module, key, name in slots:
        value = converted(values[name], dtype).contiguous()
        module._parameters[key] = nn.Parameter(value, requires_grad=False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, tensor) for parameters, tied ones once, and persistent buffers."""
    yield from model.named_parameters()
    yield from persistent_buffers(model)


# -- the adapter, and what lies beside the weights ---------------------------------------------------------------------


def _write_adapter(model: Any, stored: StoredCheckpoint, out: Path, dtype: torch.dtype | None) -> None:
    names = {id(tensor): name for name, tensor in _tensors(model)}
    for _, _, layer in lora.adapted_layers(model):
        modules = lora.adapter_modules(layer)
        slots = [(m, key, names[id(p)]) for m in modules for key, p in m._parameters.items() if p is not None]
        _fill(slots, stored, dtype)
    model.save_pretrained(out, save_embedding_layers=False)


def _copy_generation_configuration(config: ModelConfig, out: Path) -> None:
    given = Path(config.path) / "generation_config.json" if config.path else None
    if given is not None and given.is_file():
        shutil.copy(given, out)
