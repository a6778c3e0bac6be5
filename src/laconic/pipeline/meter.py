"""The bytes that autograd keeps for a module's backward, measured while it runs.

[Note: Live activations]
A storage is live from the moment a backward node saves it until the last node that saved it has run, or its graph is
freed. It counts once, no matter how many nodes save it. Inputs of the module count; its parameters and buffers do not.
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
        meter.live_bytes  # until output.backward() has passed the stage
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}  # the size of each live storage
        self._holders: Counter[int] = Counter()  # the number of saved tensors in each live storage
        self._released: deque[int] = deque()  # the storages of saved tensors that any thread has freed

    @property
    def live_bytes(self) -> int:
        """The bytes saved for backward now."""
        # A destructor must not subtract freed tensors itself, since it may run in the middle of a count.
        while self._released:
            key = self._released.popleft()
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key], self._bytes[key]
        return sum(self._bytes.values())

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        """Count the tensors that the body saves for backward. The body is one forward of `module`, as one stage.

        Raises:
            RuntimeError: in the backward of this forward, if a saved tensor was changed in place before it.
        """
        own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}

        def pack(tensor: Tensor) -> _Saved:
            storage = tensor.untyped_storage()
            is_counted = storage._cdata not in own
            if is_counted:
                self._holders[storage._cdata] += 1
                self._bytes[storage._cdata] = storage.nbytes()
            return _Saved(tensor, self._released if is_counted else None)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield


class _Saved:
    """A saved tensor in a graph, freed with its node. It keeps the storage, so that no new one has the same address."""

    def __init__(self, tensor: Tensor, released: deque[int] | None) -> None:
        # Detached: an output's graph holds the node that holds this object, and a circle would never be freed.
        self.tensor, self.version, self._released = tensor.detach(), tensor._version, released

    def __del__(self) -> None:
        if self._released is not None:
            self._released.append(self.tensor.untyped_storage()._cdata)


def _unpack(saved: _Saved) -> Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in place after forward: it "
            f"is at version {saved.tensor._version}, expected {saved.version}; change it, or step the optimizer, only "
            "after the backward that uses it"
        )
    return saved.tensor
