"""Sharded models to and from safetensors folders: laconic's own functions, and the libraries' `save_pretrained`.

`save_pretrained` and `push_to_hub` run on rank 0. All ranks send to rank 0 the tensors that will be written,
and rank 0 calls the method with them. Meanwhile the modules have their plain classes, because transformers and peft
write the names of classes into their files.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.agreement import RankGroup
from laconic.errors import JobError, listing
from laconic.hf.folder import (
    MAX_FILE_BYTES,
    ModelFolder,
    ModelFolderError,
    converted,
    needed,
    whole_or_nothing,
    write_configuration,
    write_tensors,
)
from laconic.hf.weights import load_folder, named_tensors
from laconic.layers.linear import quantized_layers
from laconic.ragged.collect import collect
from laconic.shard.sharded_module import plain_class

PATIENCE_S = 30.0
"""The time after which a rank says that it waits for the others."""


def save_pretrained(model: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
    """Save as the plain model's `save_pretrained` does, with its arguments. Collective; rank 0 writes.

    With `state_dict`, tensors that the caller has gathered, it is not collective. A peft model writes its adapters, in
    peft's format.

    Cost: every tensor that is written enters rank 0 once, counted as "control", and host memory for all of them on rank
        0. `laconic.save_safetensors` needs the memory of one output file.

    Raises:
        JobError: rank 0 cannot write, or another rank calls another method. Every rank raises it.
        NotImplementedError: `distributed_checkpoint` is set.
    """
    if options.get("distributed_checkpoint"):
        raise NotImplementedError(
            "save_pretrained(distributed_checkpoint=True) writes the states of transformers' own FSDP; write sharded "
            "checkpoints with laconic.checkpoint.save_checkpoint or torch.distributed.checkpoint"
        )
    if options.get("state_dict") is not None:
        with shown_plain(model):
            return model.save_pretrained(save_directory, *args, **options)
    return _run_on_rank_0(model, "save_pretrained", save_directory, *args, **options)


def push_to_hub(model: Any, *args: Any, **options: Any) -> Any:
    """Push as the plain model's `push_to_hub` does, with its arguments. Collective; rank 0 uploads."""
    return _run_on_rank_0(model, "push_to_hub", *args, **options)


def _run_on_rank_0(model: Any, method: str, *args: Any, **options: Any) -> Any:
    ranks = RankGroup()
    expect_all_ranks(ranks, method)
    options.pop("state_dict", None)
    return run_plain(model, gathered_state(model, **options), ranks, method, *args, **options)


def run_plain(
    model: Any, state: Mapping[str, Tensor], ranks: RankGroup, method: str, *args: Any, **options: Any
) -> Any:
    """Run a method of the plain model that saves `state` by `save_pretrained`, on rank 0. Collective over `ranks`.

    Return its result. On other ranks than 0 this is None, unless it is a text or a commit of the hub.

    Raises:
        JobError: the method failed. Every rank raises it.
    """
    results: list[Any] = []

    def run() -> str | dict[str, Any] | None:
        with shown_plain(model):
            model.__dict__["save_pretrained"] = partial(type(model).save_pretrained, model, state_dict=dict(state))
            try:
                results.append(getattr(model, method)(*args, **options))
            except (OSError, ValueError):
                raise
            except Exception as error:  # the other ranks wait for the outcome, whatever has failed
                raise JobError(f"{type(error).__name__}: {error}") from error
            finally:
                del model.__dict__["save_pretrained"]
        return _as_json(results[0])

    sent = ranks.on_rank_0(run, f"{method} failed")
    return results[0] if results else _from_json(sent)


def _as_json(result: Any) -> str | dict[str, Any] | None:
    """Return a text, or the fields of a commit of the hub, for other ranks; None for anything else."""
    if isinstance(result, str) and is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result) if field.init}
    return str(result) if isinstance(result, str) else None


def _from_json(sent: str | dict[str, Any] | None) -> Any:
    return needed("huggingface_hub").CommitInfo(**sent) if isinstance(sent, dict) else sent


@contextmanager
def shown_plain(model: nn.Module) -> Iterator[None]:
    """Give all modules their classes of before `fully_shard` inside the `with` block. Compute nothing in it."""
    sharded = [(module, type(module)) for module in model.modules()]
    try:
        for module, cls in sharded:
            module.__class__ = plain_class(cls)
        yield
    finally:
        for module, cls in sharded:
            module.__class__ = cls


def gathered_state(model: Any, **options: Any) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` writes, by their names in the model's state dict. Collective.

    They are whole on rank 0, and None on the others. `options` are those of `save_pretrained`. Tied tensors are one
    tensor under several names.
    """
    tensors = named_tensors(model)
    written = {id(tensor): tensor for tensor in _written(model, tensors, options)}
    wholes = dict(zip(written, collect(written.values()), strict=True))
    return {name: wholes[id(tensor)] for name, tensor in tensors.items() if id(tensor) in wholes}  # type: ignore[misc]


def _written(model: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that `save_pretrained` writes: all, or those of a peft model's adapters."""
    if not is_peft_model(model):
        return list(tensors.values())
    embeddings = options.get("save_embedding_layers", "auto")
    chosen = [
        tensor
        for adapter in options.get("selected_adapters") or model.peft_config
        for tensor in adapter_tensors(model, tensors, adapter, save_embedding_layers=embeddings).values()
    ]
    known = {id(tensor) for tensor in tensors.values()}
    return chosen if all(id(tensor) in known for tensor in chosen) else list(tensors.values())


def is_peft_model(model: Any) -> bool:
    """True for a model that peft has wrapped. False for one that got adapters by transformers' `add_adapter`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_tensors(
    model: Any, tensors: Mapping[str, Tensor], adapter: str, *, save_embedding_layers: Any = "auto"
) -> dict[str, Tensor]:
    """Return the tensors of one adapter, out of `tensors`, under their names in peft's files."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(
        model, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=save_embedding_layers
    )


def expect_all_ranks(ranks: RankGroup, call: str) -> None:
    """Wait until all ranks are here. Say so after `PATIENCE_S`: a call on one rank only would never end.

    Raises:
        JobError: another rank makes another call.
    """
    warning = threading.Timer(PATIENCE_S, _warn, [call])
    warning.daemon = True
    warning.start()
    try:
        calls = ranks.gather(call)
    finally:
        warning.cancel()
    if len(set(calls)) > 1:
        raise JobError(f"ranks make different calls: {', '.join(map(str, calls))}; make the same calls on every rank")


def _warn(call: str) -> None:
    warnings.warn(
        f"{call} waits for other ranks: it is collective, because every rank holds a part of the model. Call it on "
        "every rank, although rank 0 alone writes",
        stacklevel=1,
    )


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
    if not is_peft_model(model) and any(quantized_layers(model)):
        raise ValueError(
            "save_safetensors: the model has quantised weights, which from_pretrained would not read. Save adapters "
            "by a peft model, or replace each QuantizedLinear by layer.dequantized() before fully_shard"
        )
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
        load_folder(model, ModelFolder(folder, is_model=False))
        return
    tensors = named_tensors(model)
    for adapter in model.peft_config:
        own = folder if adapter == "default" else folder / adapter
        files = ModelFolder(own, is_model=False, file=_ADAPTER)
        load_folder(model, files, adapter_tensors(model, tensors, adapter))


def _stored_once(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out further names of tied tensors, and tensors that transformers does not save."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # transformers' own choice of the name to leave out
    first: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name in tied):
        first.setdefault(id(tensors[name]), name)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: t for name, t in tensors.items() if first[id(t)] == name and name not in unsaved}


def _refuse_meta(tensors: Mapping[str, Tensor], call: str) -> None:
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    if missing:
        raise ValueError(
            f"{call}: {listing(missing)} {'is' if len(missing) == 1 else 'are'} on the meta device and has no "
            "memory; call model.to_empty(device=...) first"
        )
