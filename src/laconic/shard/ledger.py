"""The bytes that the engine holds, counted alike on CPU, where no allocator counts them, and on CUDA."""

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from laconic.shard.placement import Passing

_WITHOUT = tuple(map(frozenset, ((True,), (False,), (True, False))))
"""The kinds of full buffers beside which peaks are kept: of units around others, of those that are not, and all."""


@dataclass(kw_only=True)
class Ledger:
    """Bytes of a rank's shards, gradients, node shards, full buffers, transfers; no activations or optimizer states."""

    device_bytes: int = 0
    device_peak_bytes: int = 0
    """The most bytes on the device since the last reset."""
    host_bytes: int = 0
    """Bytes of this rank's host cache."""
    _full_bytes: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0}, repr=False)
    """Bytes of full buffers, of units that are around others (True) and of those that are not."""
    _peaks_without: dict[frozenset[bool], int] | None = field(default=None, repr=False)
    """The most bytes on the device since the last reset besides these full buffers; None while nobody asks."""

    def hold(self, nbytes: int, *, on_host: bool = False, full_of: bool | None = None) -> None:
        """Add `nbytes` of device memory or, `on_host`, of host memory; a negative number when memory is freed.

        `full_of` says of which kind of units they are a full buffer: around others (True) or not.
        """
        if on_host:
            self.host_bytes += nbytes
            return
        if full_of is not None:
            self._full_bytes[full_of] += nbytes
        self.device_bytes += nbytes
        if self.device_bytes > self.device_peak_bytes:
            self.device_peak_bytes = self.device_bytes
        if self._peaks_without is not None:
            for kinds, rest_bytes in self._bytes_without().items():
                self._peaks_without[kinds] = max(self._peaks_without[kinds], rest_bytes)

    def _bytes_without(self) -> dict[frozenset[bool], int]:
        return {kinds: self.device_bytes - sum(self._full_bytes[kind] for kind in kinds) for kinds in _WITHOUT}

    def watch_passing(self) -> None:
        """Reset the peaks, and keep what `passing` needs from now on, which takes time at each change of memory."""
        self._peaks_without = dict.fromkeys(_WITHOUT, 0)
        self.reset_peak()

    def forget_passing(self) -> None:
        """End `watch_passing`."""
        self._peaks_without = None

    @property
    def passing(self) -> Passing:
        """The bytes that whole weights have added to the fullest moment since the last reset, under `watch_passing`."""
        peaks = self._peaks_without
        assert peaks is not None, "nobody has asked to watch"
        around, others, all_full = (self.device_peak_bytes - peaks[kinds] for kinds in _WITHOUT)
        return Passing(around_bytes=around, others_bytes=others, all_bytes=all_full)

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
        if self._peaks_without is not None:
            self._peaks_without = {kinds: max(0, rest) for kinds, rest in self._bytes_without().items()}


class Held:
    """A tensor that the engine holds: the ledger counts its memory from now on until `free`."""

    def __init__(self, memory: Tensor, ledger: Ledger, *, on_host: bool = False) -> None:
        self.memory = memory
        """The tensor. `free` takes the attribute away."""
        self._nbytes, self._ledger, self._on_host = memory.nbytes, ledger, on_host
        ledger.hold(self._nbytes, on_host=on_host)

    def free(self) -> None:
        """Drop the memory."""
        if "memory" in vars(self):
            del self.memory
            self._ledger.hold(-self._nbytes, on_host=self._on_host)
