"""`save_pretrained` and `push_to_hub` of sharded transformers and peft models: the libraries' own, run on rank 0.

All ranks send to rank 0 the tensors that will be written. Rank 0 then calls the library's method with them. Meanwhile
the modules have their plain classes, because transformers and peft write the names of classes into their files.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from laconic.comm.agreement import RankGroup
from laconic.errors import JobError
from laconic.hf.folder import needed
from laconic.hf.weights import named_tensors
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

    def run() -> Any:
        with shown_plain(model):
            model.__dict__["save_pretrained"] = partial(type(model).save_pretrained, model, state_dict=dict(state))
            try:
                return getattr(model, method)(*args, **options)
            except (OSError, ValueError):
                raise
            except Exception as error:  # the other ranks wait for the outcome, whatever has failed
                raise JobError(f"{type(error).__name__}: {error}") from error
            finally:
                del model.__dict__["save_pretrained"]

    results: list[Any] = []

    def run_and_keep() -> str | dict[str, Any] | None:
        results.append(run())
        return _as_json(results[0])

    sent = ranks.on_rank_0(run_and_keep, f"{method} failed")
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
