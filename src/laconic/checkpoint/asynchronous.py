"""`AsyncSaver`: a checkpoint is what training was at one instant, and training goes on while it is written.

[Note: Saving in the background]
At the call each rank copies its own parts of all tensors to host memory, and everything else it will write: from then
on the save shares nothing with the run. The rest, the whole of [Note: Commit protocol], happens on a thread, whose
ranks talk over a Gloo group of their own, so that nothing queues behind or before the run's collectives; only names,
sizes and hashes go over it. The host memory is allocated once and used again, which is one reason why the next save
waits for the one before.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from laconic.checkpoint.api import Contents, check_keep, write
from laconic.checkpoint.commit import CheckpointError
from laconic.comm.agreement import RankGroup
from laconic.islands.local_steps import LocalSteps

_ALIGNMENT_BYTES = 64


class AsyncSaver:
    """Saves checkpoints of one run in the background, one at a time. Made, used and waited for by all ranks alike.

        with AsyncSaver("checkpoints") as saver:
            for step in range(steps):
                ...
                saver.save(step, model=model, optimizer=optimizer, extra={})

    A save that fails raises its error at the next `save` or `wait`, so the last one needs a `wait`, which leaving the
    `with` block does.
    Cost: host memory for this rank's parts of parameters and optimizer state, once; if any lies on a GPU it is pinned,
    for which torch rounds it up to a power of two. Of replicated tensors (DDP) every rank copies all. The run stands
    still for the copy, and for what is left of the save before; writing and hashing take time of one core.
    See [Note: Saving in the background] in checkpoint/asynchronous.py.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        """Collective, as it makes a process group. `folder` and `keep` are those of `save_checkpoint`."""
        check_keep(keep)
        self.folder, self.keep = Path(folder), keep
        self._ranks = RankGroup(
            dist.new_group(backend="gloo") if dist.is_initialized() else None, error=CheckpointError
        )
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._written: Path | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, Any],
        local_steps: LocalSteps | None = None,
    ) -> None:
        """Begin to write `folder/step-N`, with the state of this instant; see `save_checkpoint`.

        Raises: the error of the save before, if it failed; then nothing is begun.
        """
        self.wait()
        contents = self._snapshot(Contents.of(model, optimizer, extra, local_steps, self._ranks))
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._write, args=(step, contents, device), name=f"save step {step}")
        self._thread.start()

    def wait(self) -> Path | None:
        """Return when nothing is under way: the folder of the last save, or None if there was none.

        Raises: CheckpointError (or what else it was) on every rank if it failed; the error is then told.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._written

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # the error that ends the run is the one to hear of
            self._thread.join()

    def _snapshot(self, contents: Contents) -> Contents:
        planner = SnapshotPlanner(contents.tree, self._memory)
        return Contents(tree={}, aliases=contents.aliases, sidecar=contents.sidecar, planner=planner)

    def _write(self, step: int, contents: Contents, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread starts on device 0, and would make a context there
        try:
            self._written = write(self.folder, step, contents, keep=self.keep, ranks=self._ranks)
        except BaseException as error:  # raised where somebody hears it: wait()
            self._error = error


class SnapshotPlanner(dcp.DefaultSavePlanner):
    """Plans what this rank writes when it is made, and holds copies of it; DCP's save then needs no state dict."""

    def __init__(self, tree: dict[str, Any], memory: HostMemory) -> None:
        super().__init__(flatten_sharded_tensors=False)
        super().set_up_planner(tree)
        self._local_plan = super().create_local_plan()
        items = {item.index: item.type for item in self._local_plan.items}
        values = {index: self.lookup_object(index) for index in items}
        tensors = {index: value for index, value in values.items() if items[index] is not WriteItemType.BYTE_IO}
        self._values: dict[MetadataIndex, Any] = {
            **{index: copy.deepcopy(value) for index, value in values.items() if index not in tensors},
            **memory.copies_of(tensors),
        }
        self.state_dict = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Called by DCP, with nothing in `state_dict`."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What was planned."""
        self.plan = self._local_plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The copy, once there is one."""
        return self._values[index] if hasattr(self, "_values") else super().lookup_object(index)


class HostMemory:
    """One block of host memory for copies, kept from one save to the next."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def copies_of(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies as of now, which the next call overwrites."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._block.numel() < end or (on_gpu and not self._block.is_pinned()):
            self._block = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        copies = {}
        for (index, tensor), begin in zip(tensors.items(), begins, strict=True):
            # A storage of its own within the block: of a view, DCP's writer would make another copy first.
            space = self._block.untyped_storage()[begin : begin + tensor.nbytes]
            copies[index] = torch.empty(0, dtype=tensor.dtype).set_(space, 0, tensor.shape)  # type: ignore[call-overload]
            copies[index].copy_(tensor.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies
