"""Files of torch.distributed.checkpoint (DCP). Reading runs no code of the files, and all errors are Exceptions.

DCP's own reader unpickles `.metadata` and values as they are, so a hostile folder could run code. DCP also raises
CheckpointException, a BaseException, which `except Exception` around a resume would let through.

[Note: DCP's steps, taken by ourselves]
`dcp.save` lets a planner and a writer do the work, both public interfaces, and moves their plans between ranks by
torch's object collectives, which pickle. So `save` calls the same methods in the same order, and sends plans
and results as JSON: [Note: Plain values between ranks] in comm/agreement.py. Every rank computes the plan of all ranks
from all their plans. DCP computes it on one rank, and sends each rank its part. Both are the same, because the planner
depends on nothing but its input.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from laconic import _compat
from laconic.checkpoint.commit import CheckpointError, StorageError
from laconic.comm.agreement import RankGroup

_T = TypeVar("_T")


KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in nested dicts."""


def save(
    tree: dict[str, Any],
    folder: Path,
    *,
    aliases: Mapping[KeyPath, KeyPath],
    planner: SavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's part of every tensor, without fsync: [Note: DCP's steps, taken by ourselves]. Collective.

    A tensor's key in the folder is its path in `tree`, joined by dots. `aliases` maps further paths to paths in `tree`.
    A `planner` that has planned this rank's writes may hold the tensors instead of `tree`. The ranks share the writing
    of replicated tensors.

    Raises:
        StorageError: a rank of `group` failed, with any error. Every rank raises it.
    """
    own = planner or dcp.DefaultSavePlanner(flatten_sharded_tensors=False)
    writer, ranks = _Writer(folder, aliases), RankGroup(group, error=StorageError)
    failure = f"{folder} could not be written"

    def plan_own_part() -> dict[str, Any]:
        if planner is None:
            own.set_up_planner(tree)
        writer.set_up_storage_writer(ranks.rank == 0)
        return _plan_as_json(writer.prepare_local_plan(own.create_local_plan()))

    plans = [_plan_from_json(fields) for fields in ranks.on_all(_of_one_class(plan_own_part), failure)]
    try:
        plans, metadata = own.create_global_plan(plans)
    except ValueError as error:  # on all ranks alike
        raise StorageError(f"{failure} ({error})") from error
    own_plan = writer.prepare_global_plan(plans)[ranks.rank]

    def write_own_part() -> list[Any]:
        written = writer.write_data(own.finish_plan(own_plan), own)
        written.wait()
        return [_result_as_json(result) for result in written.value()]

    written = ranks.on_all(_of_one_class(write_own_part), failure)
    results = [[_result_from_json(fields) for fields in of_rank] for of_rank in written]
    ranks.on_rank_0(_of_one_class(lambda: writer.finish(metadata, results)), failure)


def _of_one_class(action: Callable[[], _T]) -> Callable[[], _T]:
    """Let an action raise ValueError for an error of any class, so that no rank waits for one that failed."""

    def run() -> _T:
        try:
            return action()
        except (OSError, ValueError):
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    return run


def _plan_as_json(plan: SavePlan) -> dict[str, Any]:
    keys = [[key, list(path)] for key, path in plan.planner_data.items()]
    return {"items": [_item_as_json(item) for item in plan.items], "keys": keys}


def _plan_from_json(fields: dict[str, Any]) -> SavePlan:
    keys = {key: tuple(path) for key, path in fields["keys"]}
    return SavePlan([_item_from_json(item) for item in fields["items"]], planner_data=keys)


def _item_as_json(item: WriteItem) -> list[Any]:
    """Return what DCP needs to know of an item: its index, its type and, of a tensor, the properties and the chunk."""
    data = item.tensor_data
    if data is None:
        return [_index_as_json(item.index), item.type.name]
    like = data.properties
    properties = [str(like.dtype).removeprefix("torch."), like.requires_grad, like.pin_memory]
    chunk = map(list, (data.size, data.chunk.offsets, data.chunk.sizes))
    return [_index_as_json(item.index), item.type.name, properties, *chunk]


def _item_from_json(fields: list[Any]) -> WriteItem:
    index, kind, *of_tensor = fields
    data = None
    if of_tensor:
        (dtype, requires_grad, pin_memory), *chunk = of_tensor
        size, offsets, sizes = map(torch.Size, chunk)
        like = TensorProperties(dtype=getattr(torch, dtype), requires_grad=requires_grad, pin_memory=pin_memory)
        data = TensorWriteData(chunk=ChunkStorageMetadata(offsets, sizes), properties=like, size=size)
    return WriteItem(index=_index_from_json(index), type=WriteItemType[kind], tensor_data=data)


def _result_as_json(result: WriteResult) -> list[Any]:
    """Return a result; its storage data are a record of DCP without a public name, all of whose fields are plain."""
    return [_index_as_json(result.index), result.size_in_bytes, vars(result.storage_data)]


def _result_from_json(fields: list[Any]) -> WriteResult:
    index, size_in_bytes, storage = fields
    return WriteResult(
        index=_index_from_json(index), size_in_bytes=size_in_bytes, storage_data=_compat.storage_info(**storage)
    )


def _index_as_json(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index_from_json(fields: list[Any]) -> MetadataIndex:
    name, offset, index = fields
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index)


_ALLOWED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The shape and dtype of one tensor, as a folder's metadata has them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """Return the entry of a tensor."""
        return TensorMeta(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def load(values: dict[str, Any], folder: Path, *, offline: bool = False) -> None:
    """Fill this rank's part of every tensor in place, and replace other values.

    Collective, unless `offline`: then this process reads alone. Raises StorageError if a rank could not read.
    """
    if not offline:  # DCP would plan the reads together, by pickled messages, though no rank needs another's plan
        ranks = RankGroup(error=StorageError)
        ranks.on_all(lambda: load(values, folder, offline=True), f"{folder} is not readable")
        return
    planner = _SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this process reads alone
        try:
            dcp.load(values, storage_reader=_SafeReader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException
            reasons = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
            raise StorageError("; ".join(reasons)) from error


def read_values(folder: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Read small values by key, in this process alone. Raises StorageError if one is unreadable or holds objects."""
    entries = entries_of(metadata)
    try:
        values: dict[str, Any] = {
            key: torch.empty(entries[key].shape, dtype=entries[key].dtype) if key in entries else None for key in keys
        }
    except RuntimeError as error:  # the allocator refuses an absurd size
        raise StorageError(f"{folder / '.metadata'} is damaged: {error}") from error
    load(values, folder, offline=True)
    return values


def entries_of(metadata: Metadata) -> dict[str, TensorMeta]:
    """Return the tensors in a folder by key."""
    return {
        key: TensorMeta(tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_metadata(folder: Path) -> Metadata:
    """Read a folder's metadata.

    Raises:
        CheckpointError: there is none, or it names objects that are not DCP's.
        StorageError: it is damaged.
    """
    path = folder / ".metadata"
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not DCP's Metadata")
        _check_fields(metadata)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} is no DCP checkpoint: {error.strerror} ({path})") from error
    except Exception as error:  # a damaged pickle may raise any: MemoryError for an absurd length, for example
        raise StorageError(f"{path} is unreadable: {type(error).__name__}: {error}") from error
    return metadata


def _check_fields(metadata: Metadata) -> None:
    """Raise an exception of any kind if a field of the metadata is not what DCP writes."""
    for key, entry in entries_of(metadata).items():
        if not isinstance(entry.dtype, torch.dtype) or not all(isinstance(size, int) for size in entry.shape):
            raise TypeError(f"{key} has the shape {entry.shape} and the dtype {entry.dtype}")
    for name, value in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(value, (TensorStorageMetadata, BytesStorageMetadata)):
            raise TypeError(f"the entry {name!r} is no tensor and no value")
    for index, info in (metadata.storage_data or {}).items():
        if info.offset < 0 or info.length < 0 or not isinstance(info.relative_path, str):
            raise ValueError(f"{index.fqn} is at {info}")


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        record = getattr(dcp_metadata, name, None) if module == dcp_metadata.__name__ else None
        is_record = isinstance(record, type) and record.__module__ == module  # not what the module imports
        if is_dtype or is_record or (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise CheckpointError(f"the .metadata names {module}.{name}, which is not a record of DCP; it is not opened")


def _member(kind: Any, name: str) -> Any:
    """A member of one of DCP's enums, in place of the `getattr` by which Python 3.11.0 to 3.11.3 pickles it."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise CheckpointError(
        f"the .metadata asks for {name} of {kind!r}, which is no member of an enum of DCP; it is not opened"
    )


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
        # DCP would fsync `.metadata` before Python's buffer has its last bytes written out. The caller syncs instead.
        super().__init__(folder, sync_files=False)
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
