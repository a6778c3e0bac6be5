"""Where a gathered node shard stays between its uses: nowhere, in host memory, on the device, or in the whole unit.

The cache is FCDP's (arXiv 2602.06499), with versions for its dirty bit: a shard is valid until its parameters change.
"""

from __future__ import annotations

import contextlib
import mmap
import resource
import warnings
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.shard.buffer import Buffer, Counted
from laconic.shard.form import Form
from laconic.shard.full import FullBuffer
from laconic.shard.lanes import Event, Lanes
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Until, Where
from laconic.shard.room import host_memory


class NodeShard:
    """One bucket's node shard: where it stays between its uses, and the version of the parameters it was made from.

    It is gathered where it stays if collectives can use that memory, which makes it *direct*: on the device, and on the
    host if the device is the CPU. Otherwise it is gathered in the bucket's full buffer. Lanes copy it out and back if
    it stays on the host; if it stays nowhere, it goes with that buffer. If it stays on the rank, the full buffer stays.
    """

    def __init__(self, form: Form, full: FullBuffer, ledger: Ledger) -> None:
        self._form, self._full, self._ledger = form, full, ledger
        self.stay("none")
        self.until: Until = "change"
        """How long it is used."""
        self.version: int | None = None
        """The version of the parameters that it was made from; None if what it kept is lost."""
        self._memory: Buffer | None = None
        self._stored: Event = None

    @property
    def nbytes(self) -> int:
        """The bytes that it takes between its uses, those of the whole buffer if that stays."""
        if self.is_whole:
            return self._form.geometry.whole_numel * self._form.dtype.itemsize
        return self.is_kept * self._form.geometry.node_numel * self._form.dtype.itemsize

    def stay(self, where: Where, slab: Tensor | None = None) -> None:
        """Stay there from now on; on the host in `slab`, uint8 of shape (nbytes,)."""
        self.where = where
        """Where it stays."""
        self.is_kept = where != "none"
        """True if it stays somewhere."""
        self.is_whole = where == "rank"
        """True if it stays within the whole buffer, which no use frees."""
        self.is_direct = self.is_kept and (where != "host" or self._form.cluster.device.type == "cpu")
        """True if collectives can use the memory in which it stays."""
        self._slab = None if slab is None else slab.view(self._form.dtype)

    def buffer(self) -> Tensor:
        """The memory in which it stays, (N * C,)."""
        if self._slab is not None:
            return self._slab
        if self.is_whole:
            return self._full.node_shard()
        if self._memory is None:
            self._memory = Buffer(self._form.empty_node_shard(), self._ledger)
        return self._memory.memory

    def allocate(self) -> int:
        """Allocate the device memory in which it stays. Returns its bytes; 0 if it stays nowhere or on the host."""
        if self.is_whole or self.where == "device":
            self.buffer()
            return self.nbytes
        return 0

    def store(self, gathered: Tensor, version: int | None, arrived: Event, lanes: Lanes) -> Event:
        """Keep what is complete in `gathered` at `arrived`. Without a version it is never used. It stays somewhere.

        Returns the event after which the memory of `gathered` may be freed.
        """
        self.version = version
        if self.is_direct:  # it was gathered where it stays
            return None
        with lanes.to_host.going_on(arrived):
            self.buffer().copy_(gathered, non_blocking=True)
        self._stored = lanes.to_host.record_event()
        return self._stored

    def kept(self) -> Tensor:
        """What was kept last, (N * C,), complete: it waits for a copy that is under way."""
        if self._stored is not None:
            self._stored.synchronize()
        return self.buffer()

    def load_into(self, gathered: Tensor, lanes: Lanes) -> Event:
        """Copy what it kept to `gathered`, unless it is direct. Returns the event after which the copy is complete.

        Compute has waited for the event of `store` already.
        """
        if self.is_direct:
            return None
        with lanes.to_device.running():
            gathered.copy_(self.buffer(), non_blocking=True)
        return lanes.to_device.record_event()

    def free(self) -> None:
        """Free device memory. What is in the slab stays."""
        if self._memory is not None:
            self._memory.free()
            self._memory = self.version = None


def choose_device_shards(sizes_bytes: Sequence[int], budget_bytes: int) -> set[int]:
    """Choose the node shards, by index in the order of forward, that stay on the device: the last that fit the budget.

    Backward uses the last units first. The paper keeps the first layers' shards (arXiv 2602.06499, FCDP-Cache).
    """
    held_bytes = accumulate(reversed(sizes_bytes))
    num_chosen = sum(total <= budget_bytes for total in held_bytes)
    return set(range(len(sizes_bytes) - num_chosen, len(sizes_bytes)))


class Slab:
    """The host memory of all node shards of one root that stay on the host."""

    def __init__(self, cluster: Cluster, ledger: Ledger, *, is_pinned: bool) -> None:
        """Take no memory yet. What `fill` takes is page-locked if `is_pinned` and the device is an accelerator."""
        self._cluster, self._ledger, self._is_pinned = cluster, ledger, is_pinned
        self._counted = Counted(0, ledger, on_host=True)
        self._release: weakref.finalize[Any, Slab] | None = None

    def fill(self, shards: Sequence[NodeShard]) -> None:
        """Let node shards stay in host memory from now on, of which there was none."""
        if not shards:
            return
        sizes_bytes = [shard.nbytes for shard in shards]
        device = self._cluster.device if self._is_pinned else torch.device("cpu")  # whose slabs are ordinary memory
        slab = make_slab(sum(sizes_bytes), device, num_local=self._cluster.num_local)
        self._counted = Counted(slab.nbytes, self._ledger, on_host=True)
        if device.type != "cpu":
            self._release = weakref.finalize(self, free_slab, slab, device)  # keeps the slab until then
            self._release.atexit = False
        for shard, part in zip(shards, slab.split(sizes_bytes), strict=True):
            shard.stay("host", part)

    def free(self) -> None:
        """Free the memory, in which no node shard stays any more."""
        self._counted.free()
        if self._release is not None:
            self._release()
            self._release = None


def make_slab(
    nbytes: int,
    device: torch.device,
    *,
    num_local: int = 1,
    holds: str = "the host cache",
    remedy: str = "Use cache='none', or more nodes",
) -> Tensor:
    """Allocate host memory of `nbytes`, uint8, page-locked if the device is an accelerator.

    Warnings name the memory by `holds`, and end with `remedy`.

    Other accelerators than CUDA get memory of torch's pinned allocator. For CUDA laconic locks memory of exactly
    `nbytes`, because torch's allocator rounds up to a power of two (pytorch #95823). Call `free_slab` before the slab's
    last view goes. Warns if the machine has too little memory for the slabs of all `num_local` ranks, or if locking
    fails.
    """
    available, _ = host_memory()
    if nbytes * num_local > available:
        warnings.warn(
            f"{holds} needs {nbytes * num_local / 1e9:.2f} GB, but the machine has {available / 1e9:.2f} GB free: "
            f"it may swap, and then every use waits for the disk. {remedy}",
            stacklevel=2,
        )
    error = ""
    if nbytes and device.type not in ("cpu", "cuda"):
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as refusal:
            error = str(refusal)
    slab = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
    if nbytes and device.type == "cuda":
        error = _lock_pages_for_cuda(slab)
    if error:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e6:.1f} MB"
        warnings.warn(
            f"could not page-lock {holds} of {nbytes / 1e9:.2f} GB ({error}; `ulimit -l` is {limit}); using pageable "
            "memory: copies to and from it are several times slower and do not overlap with compute. Raise the limit "
            "with `ulimit -l unlimited`",
            stacklevel=2,
        )
    return slab


def free_slab(slab: Tensor, device: torch.device) -> None:
    """Unlock the pages of a slab that `make_slab` made for `device`, once no transfer uses it any more."""
    if slab.nbytes and device.type == "cuda":  # torch's allocator looks after the pages of other accelerators
        _unlock_pages_for_cuda(slab, device)


def _lock_pages_for_cuda(slab: Tensor) -> str:
    """Lock the pages of a slab by CUDA's own call; torch has none for other accelerators. Returns the error, if any."""
    error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if error and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # else torch would raise the error at its next kernel
            torch.cuda._sleep(0)
    return f"CUDA error {error}" if error else ""


def _unlock_pages_for_cuda(slab: Tensor, device: torch.device) -> None:
    """Unlock pages that `_lock_pages_for_cuda` locked, after the device has used them.

    If memory is unmapped while the driver has it locked, locking fails for the memory that is mapped there next. Any
    thread may collect a model. The current device of another one is the first GPU, on which it would make a context.
    """
    if torch.cuda.is_initialized() and slab.is_pinned():
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
