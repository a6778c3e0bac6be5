"""The bytes that the engine holds, counted alike on CPU, where no allocator counts them, and on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref

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
    is_watched: bool = field(default=False, repr=False)
    """True while somebody may ask for `passing`."""
    _full_bytes: Callable[[], dict[bool, int]] = field(default=dict, repr=False)
    """Finds the bytes of full buffers, of units that are around others (True) and of those that are not."""
    _peaks_without: dict[frozenset[bool], int] = field(default_factory=dict, repr=False)
    """The most bytes on the device since the last reset besides these full buffers."""
    _counted: dict[int, tuple[ref[Tensor], int, bool]] = field(default_factory=dict, repr=False)
    """The tensors of `hold_until_freed`, their bytes, and whether they are on the host."""

    def hold(self, nbytes: int, *, on_host: bool = False) -> None:
        """Add `nbytes` of device memory or, `on_host`, of host memory; a negative number when memory is freed."""
        if on_host:
            self.host_bytes += nbytes
            return
        self.device_bytes += nbytes
        if self.device_bytes > self.device_peak_bytes or self.is_watched:
            self.note_peak()

    def note_peak(self) -> None:
        """Note that the bytes on the device have grown: they are more than ever, or somebody may ask for `passing`."""
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_bytes)
        if self.is_watched:
            for kinds, rest_bytes in self._bytes_without(self._full_bytes()).items():
                self._peaks_without[kinds] = max(self._peaks_without[kinds], rest_bytes)

    def _bytes_without(self, full_bytes: dict[bool, int]) -> dict[frozenset[bool], int]:
        return {kinds: self.device_bytes - sum(full_bytes[kind] for kind in kinds) for kinds in _WITHOUT}

    def watch_passing(self, full_bytes: Callable[[], dict[bool, int]]) -> None:
        """Reset the peaks, and keep what `passing` needs from now on, which takes time at each change of memory.

        `full_bytes` finds the bytes of full buffers now, of units that are around others (True) and of those that are
        not.
        """
        self.is_watched, self._full_bytes, self._peaks_without = True, full_bytes, dict.fromkeys(_WITHOUT, 0)
        self.reset_peak()

    def forget_passing(self) -> None:
        """End `watch_passing`."""
        self.is_watched, self._full_bytes = False, dict

    @property
    def passing(self) -> Passing:
        """The bytes that whole weights have added to the fullest moment since the last reset, under `watch_passing`."""
        around, others, all_full = (self.device_peak_bytes - self._peaks_without[kinds] for kinds in _WITHOUT)
        return Passing(around_bytes=around, others_bytes=others, all_bytes=all_full)

    def hold_until_freed(self, tensor: Tensor, *, on_host: bool) -> None:
        """Count the memory of `tensor` as long as somebody holds the tensor."""
        self.hold(tensor.nbytes, on_host=on_host)
        reference = ref(tensor, self._let_go)  # weakref.finalize would take three calls in Python more
        self._counted[id(reference)] = reference, tensor.nbytes, on_host

    def _let_go(self, reference: ref[Tensor]) -> None:
        _, nbytes, on_host = self._counted.pop(id(reference))
        self.hold(-nbytes, on_host=on_host)

    def reset_peak(self) -> None:
        """Set the peaks to the bytes that are held now."""
        self.device_peak_bytes = self.device_bytes
        if self.is_watched:
            without = self._bytes_without(self._full_bytes())
            self._peaks_without = {kinds: max(0, rest) for kinds, rest in without.items()}
