"""Files of torch.distributed.checkpoint (DCP). Reading runs no code of the files, and all errors are Exceptions.

DCP's own reader unpickles `.metadata` and values as they are, so a hostile folder could run code. DCP also raises
CheckpointException, a BaseException, which `except Exception` around a resume would let through.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from laconic.checkpoint.commit import CheckpointError, StorageError

_ALLOWED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
}

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in nested dicts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The shape and dtype of one tensor, as a folder's metadata has them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Entry:
        """Return the entry of a tensor."""
        return Entry(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def save(
    tree: dict[str, Any],
    folder: Path,
    *,
    aliases: Mapping[KeyPath, KeyPath],
    planner: SavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's part of every tensor, and fsync it. The ranks share the writing of replicated tensors.

    A tensor's key in the folder is its path in `tree`, joined by dots. `aliases` maps further paths to paths in `tree`.
    A `planner` may hold the tensors instead of `tree`. Collective over `group`. Raises StorageError if a rank fails.
    """
    alone = not dist.is_initialized()
    with _ordinary_errors(alone):
        dcp.save(
            tree,
            storage_writer=_Writer(folder, aliases),
            planner=planner or dcp.DefaultSavePlanner(flatten_sharded_tensors=False),
            process_group=group,
            no_dist=alone,
        )


def load(values: dict[str, Any], folder: Path, *, offline: bool = False) -> None:
    """Fill this rank's part of every tensor in place, and replace other values.

    Collective, unless `offline`: then this process reads alone. Raises StorageError if a rank could not read.
    """
    alone = offline or not dist.is_initialized()
    with _ordinary_errors(alone):
        dcp.load(
            values,
            storage_reader=_SafeReader(folder),
            planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=alone,
        )


def read_values(folder: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Read small values by key, in this process alone. Raises StorageError if one is unreadable or holds objects."""
    entries = tensors_of(metadata)
    values: dict[str, Any] = {
        key: torch.empty(entries[key].shape, dtype=entries[key].dtype) if key in entries else None for key in keys
    }
    load(values, folder, offline=True)
    return values


def tensors_of(metadata: Metadata) -> dict[str, Entry]:
    """Return the tensors in a folder by key."""
    return {
        key: Entry(tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_metadata(folder: Path) -> Metadata:
    """Read a folder's metadata. Raises CheckpointError if there is none, or if it is damaged or hostile."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{folder} is no DCP checkpoint: {error.strerror} ({folder / '.metadata'})") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is unreadable: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / '.metadata'} holds a {type(metadata).__name__}, not DCP's Metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_record = module == dcp_metadata.__name__ and isinstance(getattr(dcp_metadata, name, None), type)
        if is_dtype or is_record or (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        raise CheckpointError(f"the .metadata names {module}.{name}, which is not a record of DCP; it is not opened")


class _SafeReader(dcp.FileSystemReader):
    """Reads `.metadata` with `read_metadata`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self._folder)


class _SafePlanner(dcp.DefaultLoadPlanner):
    """Reads values that are no tensors (hyper-parameters) with torch's safe subset of pickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{read_item.dest_index.fqn} holds objects, which are not read: {error}") from error


class _Writer(dcp.FileSystemWriter):
    """Writes a tied weight once, and lists it under all its names, as PyTorch does."""

    def __init__(self, folder: Path, aliases: Mapping[KeyPath, KeyPath]) -> None:
        super().__init__(folder, sync_files=True)
        self._aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add the aliases to the metadata. DCP calls it on rank 0, after all ranks have written."""
        twins = []
        for alias_path, path in self._aliases.items():
            alias, name = (".".join(map(str, keys)) for keys in (alias_path, path))
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = alias_path
            written = [result for rank_results in results for result in rank_results if result.index.fqn == name]
            twins += [replace(result, index=replace(result.index, fqn=alias)) for result in written]
        super().finish(metadata, [*results, twins])


@contextmanager
def _ordinary_errors(alone: bool) -> Iterator[None]:
    """Turn DCP's CheckpointException into a StorageError, and silence its warning of a process that is alone."""
    # Warning filters belong to the whole process. A save in the background of a job with ranks must not touch them.
    with warnings.catch_warnings() if alone else nullcontext():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            reasons = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
            raise StorageError("; ".join(reasons)) from error
