"""`AsyncSaver`: a checkpoint has the state of training at one instant, and training goes on while it is written.

[Note: Saving in the background]
`save` copies this rank's parts of all tensors, and all other values, to host memory. From then on the save shares
nothing with the run. A thread writes and commits the checkpoint by [Note: Commit protocol]. The ranks' threads talk
over a Gloo group of their own, so the save and the run's collectives never wait for each other. The host memory is
allocated once and used again. That is one reason why a save waits for the previous one.
"""

from __future__ import annotations

import copy
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from laconic.checkpoint.api import Contents, check_keep, write
from laconic.checkpoint.commit import CheckpointError
from laconic.comm.agreement import RankGroup
from laconic.comm.groups import destroy_with
from laconic.comm.launch import initialized_accelerator
from laconic.comm.messages import new_host_group
from laconic.comm.watch import waiting_for
from laconic.islands.local_steps import LocalSteps
from laconic.shard import cache

_ALIGNMENT_BYTES = 64


class BackgroundWriter:
    """Writes folders in a thread, one at a time. The ranks' threads talk over a Gloo group of their own."""

    def __init__(self, called: str, group: dist.ProcessGroup | None, error: type[ValueError]) -> None:
        """Make the process group, so all ranks of `group` call it. `called` names the writer where a rank waits.

        Ranks that could not write raise `error`.
        """
        with waiting_for(f"the process group of {called}"):
            own = new_host_group(group)
        destroy_with(self, [] if own is None else [own])
        self._ranks = RankGroup(own, error=error)
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[Path] | None = None
        self._written: Path | None = None

    def wait(self) -> Path | None:
        """Wait for the folder that is being written. Returns the last one; None if there is none yet.

        Raises:
            ValueError: it could not be written: a CheckpointError of checkpoints, a PublishError of versions. It is
                raised once, on every rank. An error of another class is raised as it is.
        """
        if (writing := self._writing) is not None:
            try:
                self._written = writing.result()
            finally:
                if writing.done():  # a user may have interrupted the waiting
                    self._writing = None
        return self._written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.wait()
        elif self._writing is not None:  # waits, and hides its error, so that the run's error is raised
            self._writing.exception()


class AsyncSaver(BackgroundWriter):
    """Saves checkpoints of one run in the background, one at a time. All ranks make it and call the same methods.

        with AsyncSaver("checkpoints") as saver:
            for step in range(steps):
                ...
                saver.save(step, model=model, optimizer=optimizer, extra={})

    If a save fails, the next `save` or `wait` raises its error. Leaving the `with` block waits for the last save.

    Cost: host memory, once, for this rank's parts of parameters and optimizer state, and for all replicated tensors
    (DDP). With an accelerator it is page-locked. Training waits for the previous save to end, and for the copy.
    Writing and hashing keep one core busy.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        """Make a process group for the saver, so all ranks call it. The arguments are those of `save_checkpoint`."""
        check_keep(keep)
        super().__init__("an AsyncSaver", None, CheckpointError)
        self.folder, self.keep = Path(folder), keep
        self._memory = HostMemory()

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, Any],
        local_steps: LocalSteps | None = None,
    ) -> None:
        """Begin to write `folder/step-N` with the state of this instant; the arguments are those of `save_checkpoint`.

        Raises:
            CheckpointError: the previous save failed. No new save is begun.
        """
        self.wait()
        contents = Contents.of(model, optimizer, extra, local_steps, self._ranks)
        contents = replace(contents, tree={}, planner=SnapshotPlanner(contents.tree, self._memory))
        self._writing = self._thread.submit(self._write, step, contents, initialized_accelerator())

    def _write(self, step: int, contents: Contents, device: torch.device | None) -> Path:
        threading.current_thread().name = f"save step {step}"
        if device is not None:
            torch.accelerator.set_device_index(device)  # a thread starts on device 0, and would make a context there
        return write(self.folder, step, contents, keep=self.keep, ranks=self._ranks)


class SnapshotPlanner(dcp.DefaultSavePlanner):
    """Plans this rank's writes and copies the values in `__init__`, so that DCP's save needs no state dict later."""

    def __init__(self, tree: dict[str, Any], memory: HostMemory) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self.set_up_planner(tree)
        self._local_plan = super().create_local_plan()
        items = {item.index: item.type for item in self._local_plan.items}
        values = {index: self.lookup_object(index) for index in items}
        tensors = {index: value for index, value in values.items() if items[index] is not WriteItemType.BYTE_IO}
        others = {index: copy.deepcopy(value) for index, value in values.items() if index not in tensors}
        self._values: dict[MetadataIndex, Any] = others | memory.copies_of(tensors)
        self.state_dict = {}

    def create_local_plan(self) -> SavePlan:
        """The plan from `__init__`."""
        return self._local_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the copy of a value; while `__init__` makes the copies, the value itself."""
        return self._values[index] if hasattr(self, "_values") else super().lookup_object(index)


class HostMemory:
    """One buffer of host memory for copies, kept from one save to the next; page-locked for an accelerator."""

    def __init__(self) -> None:
        self._take(0, torch.device("cpu"))

    def _take(self, nbytes: int, device: torch.device) -> None:
        self._device, self._buffer = device, torch.empty(0, dtype=torch.uint8)  # what was there goes first
        remedy = "Save while training waits (train.async_save = false), or use more nodes"
        self._buffer = cache.make_slab(nbytes, device, holds="the copy of a checkpoint", remedy=remedy)
        self._free = weakref.finalize(self, cache.free_slab, self._buffer, device)
        self._free.atexit = False

    def copies_of(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copy tensors into the buffer. The next call overwrites the copies. Cost: waits for the device's stream."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        accelerators = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        device = next(iter(accelerators), self._device)
        if self._buffer.numel() < end or device.type != self._device.type:
            self._free()
            self._take(end, device)
        copies = {}
        for (index, tensor), begin in zip(tensors.items(), begins, strict=True):
            # Each copy has a storage of its own within the buffer: DCP's writer would first copy a view.
            space = self._buffer.untyped_storage()[begin : begin + tensor.nbytes]
            copies[index] = torch.empty(0, dtype=tensor.dtype).set_(space, 0, tensor.shape)  # type: ignore[call-overload]
            copies[index].copy_(tensor.detach(), non_blocking=True)
        for device in accelerators:
            torch.accelerator.current_stream(device).synchronize()
        return copies
