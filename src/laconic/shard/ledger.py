"""The bytes that the engine holds, counted alike on CPU, where no allocator counts them, and on CUDA."""

import weakref
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class _Memory(Protocol):
    @property
    def nbytes(self) -> int: ...


_M = TypeVar("_M", bound=_Memory)


WITHOUT = tuple(map(frozenset, ((True,), (False,), (True, False))))
"""The kinds of full buffers beside which peaks are kept: of units around others, of those that are not, and all."""


@dataclass(kw_only=True)
class Ledger:
    """Bytes of a rank's shards, gradients, node shards, full buffers, transfers; no activations or optimizer states."""

    device_bytes: int = 0
    device_peak_bytes: int = 0
    """The most bytes on the device since the last reset."""
    host_bytes: int = 0
    """Bytes of this rank's host cache."""
    full_bytes: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0}, repr=False)
    """Bytes of full buffers, of units that are around others (True) and of those that are not."""
    peaks_without: dict[frozenset[bool], int] = field(default_factory=lambda: dict.fromkeys(WITHOUT, 0), repr=False)
    """The most bytes on the device since the last reset besides these full buffers."""

    def hold(self, nbytes: int, *, on_host: bool = False) -> None:
        """Add `nbytes` of device memory or, `on_host`, of host memory; a negative number when memory is freed."""
        if on_host:
            self.host_bytes += nbytes
            return
        held_bytes = self.device_bytes = self.device_bytes + nbytes
        if nbytes > 0:
            self.device_peak_bytes = max(self.device_peak_bytes, held_bytes)
            for kinds, peak_bytes in self.peaks_without.items():
                rest_bytes = held_bytes - sum(map(self.full_bytes.__getitem__, kinds))
                if rest_bytes > peak_bytes:
                    self.peaks_without[kinds] = rest_bytes

    def hold_full(self, nbytes: int, *, is_around: bool) -> None:
        """Add the bytes of a full buffer, of a unit that is around others or not."""
        self.full_bytes[is_around] += nbytes
        self.hold(nbytes)

    def hold_until_freed(self, tensor: Tensor, *, on_host: bool) -> None:
        """Count the memory of `tensor` as long as somebody holds the tensor.

        Python keeps what the finalizer calls for as long as the tensor lives: here this ledger, which holds nothing but
        numbers. A finalizer that held a bucket would keep the tensor's own owner, and so the tensor, for ever.
        """
        self.hold(tensor.nbytes, on_host=on_host)
        weakref.finalize(tensor, self.hold, -tensor.nbytes, on_host=on_host).atexit = False

    def reset_peak(self) -> None:
        """Set the peaks to the bytes that are held now."""
        self.device_peak_bytes = self.device_bytes
        self.peaks_without = {
            kinds: max(0, self.device_bytes - sum(self.full_bytes[kind] for kind in kinds)) for kinds in WITHOUT
        }


class Held(Generic[_M]):
    """Memory that the engine holds: the ledger counts it from now on until `free`."""

    def __init__(self, memory: _M, ledger: Ledger, *, on_host: bool = False) -> None:
        """Take a tensor, or a transfer with memory of its own."""
        self.memory = memory
        """The tensor or transfer. `free` takes the attribute away."""
        self._nbytes, self._ledger, self._on_host = memory.nbytes, ledger, on_host
        ledger.hold(self._nbytes, on_host=on_host)

    def free(self) -> None:
        """Drop the memory."""
        if "memory" in vars(self):
            del self.memory
            self._ledger.hold(-self._nbytes, on_host=self._on_host)
