"""What the engine holds, in bytes: the same account on CPU, where no allocator keeps one, and on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Engine buffers of one rank: shards and their gradients, slices, gathered units, gradient buckets, transfers.

    Activations and optimizer states are not the engine's and not in here.
    """

    device_bytes: int
    """Now, on the device."""
    device_peak_bytes: int
    """The most since the last reset."""
    host_bytes: int
    """This rank's host cache slab."""


class Ledger:
    """One rank's account for one root module."""

    def __init__(self) -> None:
        self.device_bytes = 0
        self.device_peak_bytes = 0
        self.host_bytes = 0

    def hold(self, nbytes: int) -> None:
        """Note that `nbytes` more of device memory are in use; negative when they no longer are."""
        self.device_bytes += nbytes
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_bytes)

    def reset_peak(self) -> None:
        """Start a new peak from what is held now."""
        self.device_peak_bytes = self.device_bytes

    def report(self) -> MemoryReport:
        """The account now."""
        return MemoryReport(
            device_bytes=self.device_bytes, device_peak_bytes=self.device_peak_bytes, host_bytes=self.host_bytes
        )


class FlatBuffer:
    """A flat device buffer that comes and goes while views of it stay.

    [Note: Views that outlive their memory]
    Modules and autograd keep views of a bucket across the time when its memory is given back, so freeing empties the
    storage in place and allocating fills it again; the views never change. Autograd also remembers the version of what
    it saved, and a refill with the same values must not look like an edit. The engine therefore writes through `raw`,
    an alias with a version counter of its own; `tensor`, from which all parameter views are made, counts only what a
    user changes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger) -> None:
        with torch.inference_mode(False):  # an inference tensor has no versions, and could not be trained with later
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self.raw = self.tensor.data
        self._ledger = ledger
        self._nbytes = self.tensor.nbytes
        self._storage = self.tensor.untyped_storage()
        self.is_allocated = True  # so that views can be made
        ledger.hold(self._nbytes)

    def allocate(self) -> Tensor:
        """Have memory, of unspecified content; returns `raw`."""
        if not self.is_allocated:
            self._storage.resize_(self._nbytes)
            self._ledger.hold(self._nbytes)
            self.is_allocated = True
        return self.raw

    def free(self) -> None:
        """Give the memory back; views stay valid for the next allocation."""
        if self.is_allocated:
            self._storage.resize_(0)
            self._ledger.hold(-self._nbytes)
            self.is_allocated = False


class AliasBuffer:
    """A buffer that is memory of somebody else's under another version counter; it neither comes nor goes."""

    def __init__(self, memory: Tensor) -> None:
        self.tensor = memory.data
        self.raw = memory.data

    def allocate(self) -> Tensor:
        """The memory."""
        return self.raw

    def free(self) -> None:
        """Nothing to do: the owner frees it."""
