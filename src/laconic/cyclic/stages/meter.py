"""The number of bytes that autograd keeps between forward and backward: now, and at the peak.

[Note: Live activations]
A storage is live from the moment a backward node saves it until the last node that saved it has run, or its graph is
freed. It counts once, no matter how many nodes save it. Inputs of the module count; its parameters and buffers do not.
A stage activation is the set of storages that one forward of one stage saves. It is live while any of these is live.
The meter sees saved tensors through autograd's hooks. Autograd does not check tensors that hooks packed for changes in
place. So the meter checks them, and parameters too: it finds an optimizer that steps between forward and backward.
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ActivationMeter:
    """Counts the live activations of all forwards that run under `forward`; see [Note: Live activations].

    Example:
        meter = ActivationMeter()
        with meter.forward(stage):
            output = stage(input)
        meter.live_bytes, meter.live_stages  # until output.backward() has passed the stage
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}  # the size of each live storage
        self._holders: Counter[int] = Counter()  # the number of saved tensors in each live storage
        self._saved: Counter[int] = Counter()  # the number of saved tensors of each live stage activation
        # The (storage, activation) of saved tensors that any thread has freed since the last count.
        self._released: deque[tuple[int, int]] = deque()
        self._num_forwards = 0
        self._live_bytes = self.peak_bytes = self.peak_stages = 0
        """The largest `live_bytes`, and the largest `live_stages`, since the last reset."""

    @property
    def live_bytes(self) -> int:
        """The bytes saved for backward now."""
        self._drop_released()
        return self._live_bytes

    @property
    def live_stages(self) -> int:
        """The number of stage activations live now."""
        self._drop_released()
        return len(self._saved)

    def reset_peak(self) -> None:
        """Start new peaks from what is live now."""
        self.peak_bytes, self.peak_stages = self.live_bytes, self.live_stages

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        """Count the tensors that the body saves for backward. The body is one forward of `module`, as one stage.

        Raises:
            RuntimeError: in the backward of this forward, if a saved tensor was changed in place before it.
        """
        own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        activation = self._num_forwards
        self._num_forwards += 1

        def pack(tensor: Tensor) -> _Saved:
            storage = tensor.untyped_storage()
            is_counted = storage._cdata not in own
            if is_counted:
                self._add(storage, activation)
            return _Saved(tensor, self._released if is_counted else None, activation)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _add(self, storage: torch.UntypedStorage, activation: int) -> None:
        self._drop_released()
        key = storage._cdata
        if key not in self._holders:
            self._bytes[key] = storage.nbytes()
            self._live_bytes += storage.nbytes()
        self._holders[key] += 1
        self._saved[activation] += 1
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self.peak_stages = max(self.peak_stages, len(self._saved))

    def _drop_released(self) -> None:
        """Subtract freed tensors. A destructor must not do so itself, since it may run in the middle of `_add`."""
        while self._released:
            key, activation = self._released.popleft()
            _decrement(self._saved, activation)
            if _decrement(self._holders, key) == 0:
                self._live_bytes -= self._bytes.pop(key)


def _decrement(counts: Counter[int], key: int) -> int:
    """Subtract one, drop the key if nothing is left, and return the count."""
    counts[key] -= 1
    return counts[key] or counts.pop(key)


class _Saved:
    """A saved tensor in a graph, freed with its node. It keeps the storage, so that no new one has the same address."""

    def __init__(self, tensor: Tensor, released: deque[tuple[int, int]] | None, activation: int) -> None:
        # Detached: an output's graph holds the node that holds this object, and a circle would never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version
        self._released, self._activation = released, activation

    def __del__(self) -> None:
        if self._released is not None:
            self._released.append((self.tensor.untyped_storage()._cdata, self._activation))


def _unpack(saved: _Saved) -> Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in place after forward: it "
            f"is at version {saved.tensor._version}, expected {saved.version}; change it, or step the optimizer, only "
            "after the backward that uses it"
        )
    return saved.tensor
