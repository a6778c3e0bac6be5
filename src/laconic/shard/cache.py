"""Where a gathered node shard stays between its uses: nowhere, in host memory, or on the device.

The cache is FCDP's (arXiv 2602.06499), with versions for its dirty bit: a shard is valid until its parameters change.
"""

from __future__ import annotations

import contextlib
import mmap
import resource
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from laconic.shard.lanes import Event, Lanes
from laconic.shard.ledger import Held, Ledger


class CachedShard:
    """The memory that keeps one bucket's node shard, and the version of the parameters that it was made from.

    A *direct* cache can be gathered into and from without a copy: device memory, and host memory when the device is the
    CPU. With any other cache the node shard is gathered in the bucket's full buffer, and lanes copy it out and back.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger, lanes: Lanes) -> None:
        self.numel, self._dtype, self._device = numel, dtype, device
        self._ledger, self._lanes = ledger, lanes
        self._version: int | None = None
        self._memory: Held[Tensor] | None = None
        self._slab: Tensor | None = None
        self._stored: Event = None

    @property
    def nbytes(self) -> int:
        """The bytes of the node shard."""
        return self.numel * self._dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """True if collectives can use the cache's memory itself."""
        return not self.is_in_slab or self._device.type == "cpu"

    def move_to_slab(self, slab: Tensor) -> None:
        """Keep the node shard in `slab`, uint8 of shape (nbytes,), from now on."""
        self._slab = slab.view(self._dtype)

    @property
    def is_in_slab(self) -> bool:
        """True if the node shard stays in host memory."""
        return self._slab is not None

    @property
    def has_memory(self) -> bool:
        """True if the node shard has memory now."""
        return self._slab is not None or self._memory is not None

    def holds(self, version: int) -> bool:
        """True if the cache has the node shard of the parameters of `version`."""
        return self._version == version

    def buffer(self) -> Tensor:
        """The cache's memory, (numel,)."""
        if self._slab is not None:
            return self._slab
        if self._memory is None:
            with torch.inference_mode(False):  # it may become a frozen shard, which needs versions
                memory = torch.empty(self.numel, dtype=self._dtype, device=self._device)
            self._memory = Held(memory, self._ledger)
        return self._memory.memory

    def invalidate(self) -> None:
        """Mark the cache as empty: a new node shard is being gathered."""
        self._version = None

    def store(self, node_shard: Tensor, version: int | None, arrived: Event) -> Event:
        """Keep a node shard that is complete at `arrived`. Returns the event after which its memory may be freed.

        Without a version it is never used.
        """
        self._version = version
        if self.is_direct:  # the node shard was gathered in the cache's memory
            return None
        with self._lanes.to_host.going_on(arrived):
            self.buffer().copy_(node_shard, non_blocking=True)
        self._stored = self._lanes.to_host.record_event()
        return self._stored

    def kept(self) -> Tensor:
        """The node shard that was kept last, (numel,), complete: it waits for a copy that is under way."""
        if self._stored is not None:
            self._stored.synchronize()
        return self.buffer()

    def load_into(self, node_shard: Tensor) -> Event:
        """Copy the cache to `node_shard`, unless it is direct. Returns the event after which the copy is complete.

        Compute has waited for the event of `store` already.
        """
        if self.is_direct:
            return None
        with self._lanes.to_device.running():
            node_shard.copy_(self.buffer(), non_blocking=True)
        return self._lanes.to_device.record_event()

    def free(self) -> None:
        """Free device memory. A node shard in the slab stays."""
        if self._memory is not None:
            self._memory.free()
            self._memory = self._version = None


def choose_device_shards(sizes_bytes: Sequence[int], budget_bytes: int) -> set[int]:
    """Choose the node shards, by index in the order of forward, that stay on the device: the last that fit the budget.

    Backward uses the last units first. The paper keeps the first layers' shards (arXiv 2602.06499, FCDP-Cache).
    """
    held_bytes = accumulate(reversed(sizes_bytes))
    num_chosen = sum(total <= budget_bytes for total in held_bytes)
    return set(range(len(sizes_bytes) - num_chosen, len(sizes_bytes)))


def make_slab(nbytes: int, device: torch.device, *, num_local: int = 1) -> Tensor:
    """Allocate host memory of `nbytes`, uint8, page-locked if the device is an accelerator.

    Other accelerators than CUDA get memory of torch's pinned allocator. For CUDA laconic locks memory of exactly
    `nbytes`, because torch's allocator rounds up to a power of two (pytorch #95823). Call `free_slab` before the slab's
    last view goes. Warns if the machine has too little memory for the slabs of all `num_local` ranks, or if locking
    fails.
    """
    available = _available_bytes()
    if nbytes * num_local > available:
        warnings.warn(
            f"the host cache needs {nbytes * num_local / 1e9:.2f} GB, but the machine has {available / 1e9:.2f} GB "
            "available: it may swap, and then every use of a layer waits for the disk. Use cache='none', or more nodes",
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
            f"could not page-lock the host cache of {nbytes / 1e9:.2f} GB ({error}; `ulimit -l` is {limit}); using "
            "pageable memory: copies to and from it are several times slower and do not overlap with compute. Raise "
            "the limit with `ulimit -l unlimited`",
            stacklevel=2,
        )
    return slab


def free_slab(slab: Tensor, device: torch.device) -> None:
    """Unlock the pages of a slab that `make_slab` made for `device`, once no transfer uses it any more."""
    if slab.nbytes and device.type == "cuda":  # torch's allocator looks after the pages of other accelerators
        _unlock_pages_for_cuda(slab)


def _lock_pages_for_cuda(slab: Tensor) -> str:
    """Lock the pages of a slab by CUDA's own call; torch has none for other accelerators. Returns the error, if any."""
    error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if error and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # else torch would raise the error at its next kernel
            torch.cuda._sleep(0)
    return f"CUDA error {error}" if error else ""


def _unlock_pages_for_cuda(slab: Tensor) -> None:
    """Unlock pages that `_lock_pages_for_cuda` locked.

    If memory is unmapped while the driver has it locked, locking fails for the memory that is mapped there next.
    """
    if torch.cuda.is_initialized() and slab.is_pinned():
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())


def _available_bytes() -> int:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(kib) for name, kib, *_ in lines if name == "MemAvailable:") * 1024
