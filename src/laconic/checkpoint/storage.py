"""torch.distributed.checkpoint (DCP), except that reading its metadata runs no code and its errors are Exceptions."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

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


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own records and nothing else: a checkpoint from a stranger must not run code when it is opened."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_record = module in _ALLOWED_MODULES and "." not in name and isinstance(_attribute(module, name), type)
        if is_dtype or is_record or (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's .metadata names {module}.{name}, which no checkpoint of laconic contains"
        )


class SafeReader(dcp.FileSystemReader):
    """Raises CheckpointError where DCP's own reader would run what a hostile `.metadata` asks for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self._folder)


def read_metadata(folder: Path) -> Metadata:
    with (folder / ".metadata").open("rb") as file:
        return _load_metadata(file)


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's part of every tensor and fsync it; replicated tensors are shared out over the ranks."""
    with _ordinary_errors():
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )


def load(tensors: dict[str, Tensor], folder: Path, *, offline: bool = False) -> None:
    """Fill this rank's part of every tensor in place. `offline`: this process alone, whatever group it is in."""
    with _ordinary_errors():
        dcp.load(
            tensors,
            storage_reader=SafeReader(folder),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=offline or not dist.is_initialized(),
        )


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
def _ordinary_errors() -> Iterator[None]:
    """DCP's CheckpointException is a BaseException, which `except Exception` around a resume would let through."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            reasons = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
            raise CheckpointError("; ".join(reasons)) from error
