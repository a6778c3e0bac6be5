"""Where a gathered slice rests between its uses: nowhere, in host memory, on the device.

The cache is FCDP's (arXiv 2602.06499), held by versions instead of a dirty bit: a slice is good for as
long as the parameters it was made from have not changed, however many micro-batches, evaluations or skipped steps pass.
"""

from __future__ import annotations

import contextlib
import mmap
import resource
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from laconic.shard.lanes import Lanes, Mark
from laconic.shard.ledger import Ledger

Where = Literal["none", "host", "device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Where a gathered slice rests between its uses."""

    where: Where = "none"
    """`none` frees it after each use (ZeRO-3); `host` keeps it in pinned host memory (FCDP), 1 / (local ranks) of the
    unit per rank; `device` keeps it there, as much again in device memory (ZeRO++ hpZ)."""
    device_budget_bytes: int = 0
    """Per rank, with `host` only: the last units, which backward wants first, rest on the device until this is
    spent."""

    def __post_init__(self) -> None:
        if self.where not in get_args(Where):
            raise ValueError(f"cache={self.where!r} is not known; use one of {', '.join(map(repr, get_args(Where)))}")
        if self.device_budget_bytes < 0:
            raise ValueError(f"device_budget_bytes={self.device_budget_bytes} must not be negative")
        if self.device_budget_bytes and self.where != "host":
            raise ValueError(
                f"device_budget_bytes={self.device_budget_bytes} needs cache='host', of which it moves a part to the "
                f"device; got cache={self.where!r}"
            )

    @classmethod
    def of(cls, cache: Cache | Where) -> Cache:
        """A policy from what `fully_shard(cache=)` takes."""
        return cache if isinstance(cache, Cache) else cls(where=cache)

    def node_gathers_per_step(self, *, num_micro_batches: int) -> int:
        """Times a trainable bucket's weights cross the wire per optimizer step (arXiv 2602.06499)."""
        return 2 * num_micro_batches if self.where == "none" else 1


class RestingSlice:
    """One bucket's slice between uses, with the version of the parameters it was made from.

    *Direct* memory can be gathered from and into as it is: the device's own, and host memory when the device is the
    CPU. Otherwise the slice is staged in the bucket's full buffer, where it is gathered, and copied out and back on
    lanes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger, lanes: Lanes) -> None:
        self.numel, self._dtype, self._device = numel, dtype, device
        self._ledger, self._lanes = ledger, lanes
        self._version: int | None = None
        self._buffer: Tensor | None = None
        self._in_slab = False
        self._stored: Mark = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return self.numel * self._dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """True if the backend can use the memory without staging."""
        return not self._in_slab or self._device.type == "cpu"

    @property
    def is_in_slab(self) -> bool:
        """True if the slice rests in the host slab."""
        return self._in_slab

    def rest_in(self, slab: Tensor) -> None:
        """Live in `slab`, uint8 (nbytes,), from now on."""
        self._buffer = slab.view(self._dtype)
        self._in_slab = True

    def holds(self, version: int) -> bool:
        """True if the slice made from parameters of `version` is here."""
        return self._version == version

    def landing(self, staging: Tensor | None) -> Tensor:
        """Where the gather across nodes shall put the slice; `staging` is the slice's place in the full buffer."""
        self._version = None
        if not self.is_direct:
            assert staging is not None
            return staging
        return self.buffer()

    def buffer(self) -> Tensor:
        """The resting memory, (numel,)."""
        if self._buffer is None:
            with torch.inference_mode(False):  # a frozen shard may come to live here, and shards have versions
                self._buffer = torch.empty(self.numel, dtype=self._dtype, device=self._device)
            self._ledger.hold(self.nbytes)
        return self._buffer

    def keep(self, slice_: Tensor, version: int) -> Mark:
        """The slice has landed; returns the mark behind which its staging memory may be freed."""
        self._version = version
        if self.is_direct:
            return None
        with self._lanes.to_host.running(self._lanes.gather.mark()):
            self.buffer().copy_(slice_, non_blocking=True)
        self._stored = self._lanes.to_host.mark()
        return self._stored

    def fetch(self, staging: Tensor | None) -> tuple[Tensor, Mark]:
        """The slice for a gather inside the node, and the mark behind which it is there."""
        if self.is_direct:
            return self.buffer(), None
        assert staging is not None
        with self._lanes.to_device.running(self._stored):
            staging.copy_(self.buffer(), non_blocking=True)
        return staging, self._lanes.to_device.mark()

    def drop(self) -> None:
        """Give device memory back; a slice in the slab stays, for as long as its version is right."""
        if not self._in_slab and self._buffer is not None:
            self._buffer = None
            self._version = None
            self._ledger.hold(-self.nbytes)


def choose_device_slices(sizes: Sequence[int], budget_bytes: int) -> set[int]:
    """Which of the slices, given in the order of forward, stay on the device: the last ones that fit the budget.

    Backward begins at the end, so the last layers' slices are wanted soonest; the paper keeps the first ones, which are
    wanted last (arXiv 2602.06499, FCDP-Cache).
    """
    chosen = set()
    for index in reversed(range(len(sizes))):
        if sizes[index] > budget_bytes:
            break
        budget_bytes -= sizes[index]
        chosen.add(index)
    return chosen


def make_slab(nbytes: int, device: torch.device, *, num_local: int = 1) -> Tensor:
    """Host memory of exactly `nbytes`, uint8, page-locked if the device is a GPU. One of `num_local` on this machine.

    torch's pinned allocator rounds to powers of two (pytorch #95823), up to twice the bytes; an anonymous map does not.
    Whoever lets the last view of it go must call `free_slab` first.
    """
    available = _available_bytes()
    if nbytes * num_local > available:
        warnings.warn(
            f"the host cache needs {nbytes * num_local / 1e9:.2f} GB, but the machine has {available / 1e9:.2f} GB "
            "available: it may swap, and then every use of a layer waits for the disk. Use cache='none', or more nodes",
            stacklevel=2,
        )
    slab = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
    if device.type == "cuda" and nbytes:
        _page_lock(slab)
    return slab


def _page_lock(slab: Tensor) -> None:
    error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if error:
        if torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):  # the runtime keeps the error for torch's check of its next kernel
                torch.cuda._sleep(0)
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e6:.1f} MB"
        warnings.warn(
            f"could not page-lock the host cache of {slab.nbytes / 1e9:.2f} GB (CUDA error {error}; `ulimit -l` is "
            f"{limit}); using pageable memory: copies to and from it are several times slower and do not overlap with "
            "compute. Raise the limit with `ulimit -l unlimited`",
            stacklevel=3,
        )


def free_slab(slab: Tensor) -> None:
    """End the page-locking of a slab from `make_slab`, when no transfer uses it any more.

    Memory that is unmapped while the driver has it locked makes locking fail for what is mapped there next.
    """
    if slab.nbytes and torch.cuda.is_initialized() and slab.is_pinned():
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
