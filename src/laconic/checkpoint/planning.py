"""The plan of a save with torch.distributed.checkpoint (DCP), on which the ranks agree without pickles.

[Note: DCP's steps, taken by ourselves]
`dcp.save` lets a planner and a writer do the work, both public interfaces, and moves their plans between ranks by
torch's object collectives, which pickle. So `save_together` calls the same methods in the same order, and sends plans
and results as JSON: [Note: Plain values between ranks] in comm/agreement.py. Every rank computes the plan of all ranks
from all their plans. DCP computes it on one rank, and sends each rank its part. Both are the same, because the planner
depends on nothing but its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from laconic import _compat
from laconic.checkpoint.commit import StorageError
from laconic.comm.agreement import RankGroup

_T = TypeVar("_T")


def save_together(
    tree: dict[str, Any], writer: FileSystemWriter, planner: SavePlanner, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's part of every tensor of `tree`: [Note: DCP's steps, taken by ourselves]. Collective.

    Raises:
        StorageError: a rank failed, with any error. Every rank raises it.
    """
    ranks = RankGroup(group, error=StorageError)
    failure = f"{writer.checkpoint_id} could not be written"
    is_first = ranks.rank == 0

    def plan_own_part() -> dict[str, Any]:
        planner.set_up_planner(tree, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return _plan_as_json(writer.prepare_local_plan(planner.create_local_plan()))

    plans = [_plan_from_json(fields) for fields in ranks.on_all(_of_one_class(plan_own_part), failure)]
    try:
        plans, metadata = planner.create_global_plan(plans)
    except ValueError as error:  # on all ranks alike
        raise StorageError(f"{failure} ({error})") from error
    own_plan = writer.prepare_global_plan(plans)[ranks.rank]

    def write_own_part() -> list[Any]:
        written = writer.write_data(planner.finish_plan(own_plan), planner)
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
    keys = None if plan.planner_data is None else [[key, list(path)] for key, path in plan.planner_data.items()]
    return {"items": [_item_as_json(item) for item in plan.items], "keys": keys}


def _plan_from_json(fields: dict[str, Any]) -> SavePlan:
    keys = None if fields["keys"] is None else {key: tuple(path) for key, path in fields["keys"]}
    return SavePlan([_item_from_json(item) for item in fields["items"]], planner_data=keys)


def _item_as_json(item: WriteItem) -> list[Any]:
    """Return what DCP needs to know of an item: its index, its type and, of a tensor, the chunk and the properties."""
    data = item.tensor_data
    if data is None:
        return [_index_as_json(item.index), item.type.name]
    like = data.properties
    properties = [str(like.dtype).removeprefix("torch."), like.requires_grad, like.pin_memory]
    return [
        *(_index_as_json(item.index), item.type.name, properties),
        *(list(data.size), list(data.chunk.offsets), list(data.chunk.sizes)),
    ]


def _item_from_json(fields: list[Any]) -> WriteItem:
    index, kind, *of_tensor = fields
    data = None
    if of_tensor:
        (dtype, requires_grad, pin_memory), size, offsets, sizes = of_tensor
        like = TensorProperties(dtype=getattr(torch, dtype), requires_grad=requires_grad, pin_memory=pin_memory)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
            properties=like,
            size=torch.Size(size),
        )
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
