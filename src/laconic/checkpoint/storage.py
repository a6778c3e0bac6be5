"""torch.distributed.checkpoint (DCP), except that reading its folders runs no code and its errors are Exceptions."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from laconic.checkpoint.commit import CheckpointError

_ALLOWED_MODULES = ("torch.distributed.checkpoint.metadata",)
_ALLOWED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
}


class StorageError(CheckpointError):
    """DCP could not write or read the files of a folder; raised on all ranks alike."""


KeyPath = tuple[str | int, ...]
"""Where a value lies in a nested dict."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a folder's metadata says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Entry:
        return Entry(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own records and nothing else: a checkpoint from a stranger must not run code when it is opened."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_record = module in _ALLOWED_MODULES and "." not in name and isinstance(_attribute(module, name), type)
        if is_dtype or is_record or (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's .metadata names {module}.{name}, which is none of DCP's records; it is not opened"
        )


class SafeReader(dcp.FileSystemReader):
    """Raises CheckpointError where DCP's own reader would run what a hostile `.metadata` asks for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self._folder)


class _SafePlanner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor (hyper-parameters) as torch's safe subset of pickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{read_item.dest_index.fqn} holds objects, which are not read: {error}") from error


class _Writer(dcp.FileSystemWriter):
    """Lets a tensor be found under several names, as tied weights are by PyTorch, and be on disk once."""

    def __init__(self, folder: Path, aliases: Mapping[KeyPath, KeyPath]) -> None:
        super().__init__(folder, sync_files=True)
        self._aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all have written."""
        twins = []
        for alias_path, path in self._aliases.items():
            alias, name = _key(alias_path), _key(path)
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = alias_path
            written = [result for of_rank in results for result in of_rank if result.index.fqn == name]
            twins += [replace(result, index=replace(result.index, fqn=alias)) for result in written]
        super().finish(metadata, [*results, twins])


def read_metadata(folder: Path) -> Metadata:
    """Raises: CheckpointError if there is none, or it is damaged or hostile."""
    try:
        with (folder / ".metadata").open("rb") as file:
            return _load_metadata(file)
    except OSError as error:
        raise CheckpointError(f"{folder} is no DCP checkpoint: {error.strerror} ({folder / '.metadata'})") from error


def tensors_of(metadata: Metadata) -> dict[str, Entry]:
    """The tensors in a folder by key."""
    return {
        key: Entry(tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def save_planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(flatten_sharded_tensors=False)


def save(
    tree: dict[str, Any],
    folder: Path,
    *,
    aliases: Mapping[KeyPath, KeyPath],
    planner: SavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's part of every tensor and fsync it; replicated tensors are shared out over the ranks.

    Args:
        tree: nested dicts; a tensor's key in the folder is its path joined by dots.
        aliases: further paths of tensors, each with the path under which the tensor is in `tree`.
        planner: if not `save_planner()`.
        group: what the ranks talk over; the default group if None.
    """
    alone = not dist.is_initialized()
    with _ordinary_errors(alone):
        dcp.save(
            tree,
            storage_writer=_Writer(folder, aliases),
            planner=planner or save_planner(),
            process_group=group,
            no_dist=alone,
        )


def load(tensors: dict[str, Tensor], folder: Path, *, offline: bool = False) -> None:
    """Fill this rank's part of every tensor in place. `offline`: this process alone, whatever group it is in."""
    _load(tensors, folder, offline=offline)


def read_values(folder: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Small values by key: numbers, strings, lists of them, and whole tensors. This process alone."""
    entries = tensors_of(metadata)
    values: dict[str, Any] = {
        key: torch.empty(entries[key].shape, dtype=entries[key].dtype) if key in entries else None for key in keys
    }
    _load(values, folder, offline=True)
    return values


def _load(values: dict[str, Any], folder: Path, *, offline: bool) -> None:
    alone = offline or not dist.is_initialized()
    with _ordinary_errors(alone):
        dcp.load(
            values,
            storage_reader=SafeReader(folder),
            planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=alone,
        )


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _load_metadata(file: IO[bytes]) -> Metadata:
    try:
        metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(f"the checkpoint's .metadata is unreadable: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"the checkpoint's .metadata holds a {type(metadata).__name__}")
    return metadata


def _attribute(module: str, name: str) -> Any:
    return getattr(torch.distributed.checkpoint.metadata, name, None) if module in _ALLOWED_MODULES else None


@contextmanager
def _ordinary_errors(alone: bool) -> Iterator[None]:
    """DCP's CheckpointException is a BaseException, which `except Exception` around a resume would let through."""
    # Filters of warnings belong to the whole process: a save in the background, never alone, leaves them as they are.
    with warnings.catch_warnings() if alone else nullcontext():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            reasons = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
            raise StorageError("; ".join(reasons)) from error
