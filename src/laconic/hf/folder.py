"""The safetensors files of a Hugging Face model folder: read, and written whole or not at all.

[Note: Why DCP's safetensors reader and writer are not used]
`torch.distributed.checkpoint.HuggingFaceStorageReader` opens every safetensors file of a folder, also the files of
adapters. It ignores the index, does not name a damaged file, and cannot read whole tensors one by one, as transformers'
conversions need. `HuggingFaceStorageWriter` takes a state dict that is in memory, but `laconic export` holds one output
file at a time. So this module calls safetensors directly.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.comm.agreement import RankGroup
from laconic.errors import JobError
from laconic.extras import how_to_install
from laconic.shard.sharded_module import plain_class
from laconic.store.files import make_folder, remove, sync

INDEX = "model.safetensors.index.json"
"""The file of a folder that says which file holds which tensor."""


class ModelFolderError(JobError):
    """A model folder is unreadable or does not fit its own config.json."""


def needed(module: str) -> Any:
    """Import a module of another package.

    Raises:
        ImportError: the package is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}: safetensors folders need it; {how_to_install('train')}") from error


class ModelFolder:
    """The tensors in a folder's safetensors files. A file is opened when its first tensor is needed."""

    def __init__(self, folder: str | Path, *, is_model: bool = True, file: str = "") -> None:
        """Open the folder: that of a job's model, with a config.json, or with `is_model` false one of tensors alone.

        `file` is the only file to read. Default: those of the index, or all but adapters.

        Raises:
            ModelFolderError: the path is no folder; it lacks safetensors files, or the config.json of a model; or a
                file is unreadable.
        """
        self.folder = Path(folder)
        self.is_model = is_model
        self._title = f"{'model.path' if is_model else 'folder'} = {str(folder)!r}"
        self.bytes_read = 0
        """The bytes of all tensors, and parts of tensors, that `read` has returned."""
        self._handles: dict[str, Any] = {}
        if not os.path.isdir(self.folder):  # unlike Path.is_dir, it is false for a name that is too long
            raise ModelFolderError(f"{self._title} is not a folder; give one with safetensors files")
        if is_model and not (self.folder / "config.json").is_file():
            raise ModelFolderError(f"{self._title} has no config.json; is it a model folder?")
        self._file_of = dict.fromkeys(self._open(file).keys(), file) if file else self._find_files()

    def keys(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            ModelFolderError: the file cannot be read, or lacks the tensor that the index says it has.
        """
        return tuple(self._asked(key, lambda file: file.get_slice(key).get_shape()))

    def read(self, key: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or the given part of it, in the dtype of the file.

        Raises:
            ModelFolderError: the file cannot be read.
        """
        tensor = self._asked(key, lambda file: file.get_slice(key)[part] if part else file.get_tensor(key))
        self.bytes_read += tensor.nbytes
        return tensor

    def _asked(self, key: str, question: Callable[[Any], Any]) -> Any:
        """Ask the file of a tensor."""
        file = self._open(self._file_of[key])
        try:
            return question(file)
        except Exception as error:  # safetensors raises its own class, and others
            raise ModelFolderError(f"cannot read {key} from {self.folder / self._file_of[key]}: {error}") from error

    def _open(self, name: str) -> Any:
        if name not in self._handles:
            safe_open = needed("safetensors").safe_open
            try:
                self._handles[name] = safe_open(self.folder / name, framework="pt")
            except Exception as error:  # safetensors raises its own class, OSError and FileNotFoundError
                raise ModelFolderError(f"{self.folder / name} is not a readable safetensors file: {error}") from error
        return self._handles[name]

    def _find_files(self) -> dict[str, str]:
        """Return the file name of every tensor."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ModelFolderError(f"{index} is not a readable index of safetensors files: {error!r}") from error
        files = sorted(path.name for path in self.folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
        if not files:
            pickled = ", ".join(sorted(path.name for path in self.folder.glob("*.bin")))
            remedy = (
                f"it has {pickled}, pickled files that laconic does not open: load it once with transformers and "
                "save_pretrained it"
                if pickled
                else "download the model with its .safetensors files"
            )
            raise ModelFolderError(f"{self._title} has no safetensors file; {remedy}")
        return {key: name for name in files for key in self._open(name).keys()}  # noqa: SIM118


MAX_FILE_BYTES = 5_000_000_000
"""The default size of an output file. Rank 0 holds one in memory."""


def refuse_existing(out: Path) -> None:
    """Raise JobError if `out` is a file, or a folder with something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"{out} exists already; give a folder that does not")


@contextmanager
def whole_or_nothing(out: Path, ranks: RankGroup) -> Iterator[Path]:
    """Yield a new folder beside `out`, and rename it to `out` if the block succeeds. Collective over `ranks`.

    Rank 0 makes the folder, renames it once its files are on the disk, and removes it if the block fails on rank 0.

    Raises:
        JobError: rank 0 cannot make or rename the folder, or `out` has something in it. Every rank raises it.
    """
    writing = out.with_name(f"{out.name}.writing")
    ranks.on_rank_0(partial(_begin, out, writing), f"cannot write {out}")
    try:
        yield writing
    except BaseException:
        if ranks.rank == 0:
            remove(writing)
        raise
    ranks.on_rank_0(partial(_finish, out, writing), f"cannot write {out}")


def _begin(out: Path, writing: Path) -> None:
    refuse_existing(out)
    remove(writing)
    make_folder(out.parent)
    writing.mkdir()


def _finish(out: Path, writing: Path) -> None:
    for path in (*writing.iterdir(), writing):
        sync(path)
    if out.exists():
        out.rmdir()
    writing.rename(out)
    sync(out.parent)


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
