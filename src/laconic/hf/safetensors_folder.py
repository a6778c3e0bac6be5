"""`save_safetensors` and `load_safetensors`: models, sharded or not, as folders of safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codec.linear import quantized_layers
from laconic.comm.agreement import RankGroup
from laconic.hf.folder import ModelFolder, ModelFolderError, needed
from laconic.hf.folder_writer import MAX_FILE_BYTES, converted, whole_or_nothing, write_configuration, write_tensors
from laconic.hf.saving import adapter_tensors, expect_all_ranks, gathered_state, is_peft_model, run_plain
from laconic.hf.weights import load_folder, named_tensors
from laconic.ragged.collect import collect

_ADAPTER = "adapter_model.safetensors"


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model's parameters and persistent buffers, whole or not at all. Collective; rank 0 writes.

    The folder has one file, or several and their index, as transformers names them. Tensors have the names of the plain
    model, and tied ones are stored once. Buffers are those of rank 0. A transformers model gets its config.json and
    generation_config.json, and `from_pretrained` loads the folder. A peft model gets its adapters only, in peft's
    format.

    Args:
        model: any module: plain, sharded, with other parallelisms, with partial updates, or under FSDP2. With
            `LocalSteps` the files have the parameters of rank 0's island.
        folder: a folder that does not exist, or an empty one, for rank 0 to write.
        dtype: the dtype of floating-point tensors in the files. Default: each tensor's own.
        max_file_bytes: the size of a file. A larger tensor has a file of its own.

    Cost: each element enters rank 0 once, counted as "control". Host memory for one file, or for the largest tensor, on
        rank 0, and what `collect` says on the others.

    Raises:
        JobError: the folder has something in it, or rank 0 cannot write. Every rank raises it.
        ValueError: a tensor is on the meta device, or a weight is quantised.
        ImportError: safetensors or huggingface_hub is not installed.
    """
    for package in ("safetensors.torch", "huggingface_hub"):
        needed(package)
    _refuse_meta(named_tensors(model), "save_safetensors")
    _refuse_quantised(model)
    ranks = RankGroup()
    expect_all_ranks(ranks, "save_safetensors")
    with whole_or_nothing(Path(folder), ranks) as writing:
        if hasattr(model, "peft_config"):
            state = gathered_state(model)
            values = {name: value if value is None else converted(value, dtype) for name, value in state.items()}
            run_plain(model, values, ranks, "save_pretrained", writing)
            return
        tensors = _stored_once(model, named_tensors(model))

        def read(names: Sequence[str]) -> Iterable[Tensor | None]:
            return collect(tensors[name] for name in names)

        write_tensors(writing, tensors, read, dtype=dtype, max_file_bytes=max_file_bytes, ranks=ranks)
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            ranks.on_rank_0(partial(write_configuration, model, writing, dtype), f"cannot write {folder}")


def load_safetensors(model: nn.Module, folder: str | Path) -> None:
    """Fill a model from a folder of safetensors files. Every rank calls it, and reads its own parts only.

    The folder may be one of `save_safetensors`, `laconic export` or transformers; for a peft model, one of peft's. It
    holds every parameter and persistent buffer of the model, tied ones under one of their names or more. Values are
    converted to the model's dtypes, and those of quantised weights are encoded.

    Raises:
        ModelFolderError: the folder is unreadable or does not fit the model. The message lists the tensors, and every
            rank raises it.
        ValueError: a tensor of the model is on the meta device.
        ImportError: safetensors is not installed.
    """
    needed("safetensors")
    _refuse_meta(named_tensors(model), "load_safetensors")
    ranks = RankGroup(error=ModelFolderError)
    expect_all_ranks(ranks, "load_safetensors")
    ranks.agree(partial(_load, model, Path(folder)))


def _load(model: Any, folder: Path) -> None:
    if not is_peft_model(model):
        load_folder(model, ModelFolder(folder, called="folder", is_model=False))
        return
    tensors = named_tensors(model)
    for adapter in model.peft_config:
        own = folder if adapter == "default" else folder / adapter
        files = ModelFolder(own, called="folder", is_model=False, file=_ADAPTER)
        load_folder(model, files, adapter_tensors(model, tensors, adapter))


def _stored_once(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out further names of tied tensors, and tensors that transformers does not save."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # transformers' own choice of the name to leave out
    first: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name in tied):
        first.setdefault(id(tensors[name]), name)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: t for name, t in tensors.items() if first[id(t)] == name and name not in unsaved}


def _refuse_quantised(model: nn.Module) -> None:
    if not is_peft_model(model) and any(quantized_layers(model)):
        raise ValueError(
            "save_safetensors: the model has quantised weights, which from_pretrained would not read. Save adapters "
            "by a peft model, or replace each QuantizedLinear by layer.dequantized() before fully_shard"
        )


def _refuse_meta(tensors: Mapping[str, Tensor], call: str) -> None:
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    if missing:
        raise ValueError(
            f"{call}: {', '.join(missing[:8])} {'is' if len(missing) == 1 else 'are'} on the meta device and has no "
            "memory; call model.to_empty(device=...) first"
        )
