"""The safetensors files of a Hugging Face model folder.

[Note: Why DCP's safetensors reader and writer are not used]
`torch.distributed.checkpoint.HuggingFaceStorageReader` opens every safetensors file of a folder, also the files of
adapters. It ignores the index, does not name a damaged file, and cannot read whole tensors one by one, as transformers'
conversions need. `HuggingFaceStorageWriter` takes a state dict that is in memory, but `laconic export` holds one output
file at a time. So this module and `folder_writer.py` call safetensors directly.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.errors import JobError
from laconic.extras import how_to_install

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

    def __init__(
        self, folder: str | Path, *, called: str = "model.path", is_model: bool = True, file: str = ""
    ) -> None:
        """Open the folder, which messages name as `called`. `is_model` asks for a config.json.

        `file` is the only file to read. Default: those of the index, or all but adapters.

        Raises:
            ModelFolderError: the path is no folder; it lacks safetensors files, or the config.json of a model; or a
                file is unreadable.
        """
        self.folder = Path(folder)
        self.is_model = is_model
        self._title = f"{called} = {str(folder)!r}"
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
        file = self._open(self._file_of[key])
        try:
            return tuple(file.get_slice(key).get_shape())
        except Exception as error:  # safetensors raises its own class
            raise ModelFolderError(f"cannot read {key} from {self.folder / self._file_of[key]}: {error}") from error

    def read(self, key: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or the given part of it, in the dtype of the file.

        Raises:
            ModelFolderError: the file cannot be read.
        """
        file = self._open(self._file_of[key])
        try:
            tensor = file.get_slice(key)[part] if part else file.get_tensor(key)
        except Exception as error:  # safetensors raises its own class, and others
            raise ModelFolderError(f"cannot read {key} from {self.folder / self._file_of[key]}: {error}") from error
        self.bytes_read += tensor.nbytes
        return tensor

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
