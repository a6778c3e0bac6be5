"""Writes a folder of safetensors files, one output file at a time, whole or not at all."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.comm.agreement import RankGroup
from laconic.errors import JobError
from laconic.hf.folder import INDEX, needed
from laconic.shard.sharded_module import plain_class

MAX_FILE_BYTES = 5_000_000_000
"""The default size of an output file. Rank 0 holds one in memory."""


class ThisProcess(RankGroup):
    """This process alone, also where torch.distributed has more ranks."""

    def __init__(self) -> None:
        """Make a group of one rank."""
        self.group, self._error, self.rank, self.size = None, JobError, 0, 1


def refuse_existing(out: Path) -> None:
    """Raise JobError if `out` is a file, or a folder with something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"{out} exists already; give a folder that does not")


@contextmanager
def whole_or_nothing(out: Path, ranks: RankGroup) -> Iterator[Path]:
    """Yield a new folder beside `out`, and rename it to `out` if the block succeeds. Collective over `ranks`.

    Rank 0 makes the folder, renames it, and removes it if the block fails on rank 0.

    Raises:
        JobError: rank 0 cannot make or rename the folder, or `out` has something in it. Every rank raises it.
    """
    writing = out.with_name(f"{out.name}.writing")
    ranks.on_rank_0(partial(_begin, out, writing), f"cannot write {out}")
    try:
        yield writing
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise
    ranks.on_rank_0(partial(_finish, out, writing), f"cannot write {out}")


def _begin(out: Path, writing: Path) -> None:
    refuse_existing(out)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def _finish(out: Path, writing: Path) -> None:
    if out.exists():
        out.rmdir()
    writing.rename(out)


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[Sequence[str]], Iterable[Tensor | None]],
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    ranks: RankGroup,
) -> None:
    """Write safetensors files of up to `max_file_bytes`, and their index if there are several. Collective over `ranks`.

    `tensors` have the shapes and dtypes; their values are not used. `read(names)` yields the values of a file's tensors
    on rank 0, which writes, and None on the others. `dtype` is that of floating-point tensors in the files; None keeps
    each tensor's own. A tensor larger than `max_file_bytes` has its own file.

    Raises:
        JobError: rank 0 cannot write. Every rank raises it.
    """
    split = needed("huggingface_hub").split_torch_state_dict_into_shards
    on_meta = {
        name: converted(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), dtype)
        for name, tensor in tensors.items()
    }
    files = split(on_meta, max_shard_size=max_file_bytes)
    for file_name, names in files.filename_to_tensors.items():
        values = {
            name: _storable(converted(value, dtype))
            for name, value in zip(names, read(names), strict=True)
            if value is not None
        }
        ranks.agree(partial(_write_file, folder / file_name, values), only=ranks.rank == 0)
        values.clear()  # before the next file is read
    if files.is_sharded and ranks.rank == 0:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1))


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating-point tensor in `dtype`, unless that is None; return any other tensor as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def write_configuration(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the config.json and generation_config.json of a transformers model, which may be sharded.

    They name the model's own class, and `dtype`, or the dtype of the model's weights if that is None.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    config.architectures = [plain_class(type(model)).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _storable(tensor: Tensor) -> Tensor:
    """A contiguous tensor that shares its memory with no other, as safetensors asks."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors = needed("safetensors.torch")
    try:
        safetensors.save_file(tensors, path, metadata={"format": "pt"})
    except Exception as error:  # safetensors raises its own class, OSError and others
        raise JobError(f"cannot write {path}: {error}") from error
