"""What one device measures while it trains: the bytes that autograd keeps, the bytes sent, durations and waits.

[Note: Live activations]
A storage is live from the moment a backward node saves it until the last node that saved it has run, or its graph is
freed. It counts once, no matter how many nodes save it. Inputs of the module count; its parameters and buffers do not.
A stage activation is the set of storages that one forward of one stage saves. It is live while any of these is live.
The meter sees saved tensors through autograd's hooks. Autograd does not check tensors that hooks packed for changes in
place. So the meter checks them, and parameters too: it finds an optimizer that steps between forward and backward.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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


_LATE = 0.1  # a device is late if it waits longer than this share of an op's mean duration
_TRACE_LENGTH = 1 << 16  # the number of latest changes that the trace keeps


@dataclass
class Report:
    """The counters of one device. They cover the last step, unless said otherwise."""

    live_now: int = 0
    """The number of stage activations alive on this device: forwards whose backward has not run."""
    live_peak: int = 0
    """The largest `live_now` since the beginning."""
    bytes_per_step: list[int] = field(default_factory=lambda: [0])
    """The bytes sent before the first op, and after each op."""
    largest_burst: int = 0
    """The largest number of bytes sent between two ops, since the beginning. The two may be of different batches."""
    durations_s: list[float] = field(default_factory=list)
    """The duration of each op, without the wait before it."""
    waits_s: list[float] = field(default_factory=list)
    """The time that the device waited for messages before each op."""
    trace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_TRACE_LENGTH))
    """The latest changes of `live_now`, as (time.monotonic(), value). `peak_together` merges the traces of devices."""
    _burst: int = 0  # the bytes sent since the last op

    @property
    def on_time(self) -> float:
        """The share of ops before which this device waited at most a tenth of an op's mean duration."""
        if not self.durations_s:
            return 1.0
        patience_s = _LATE * sum(self.durations_s) / len(self.durations_s)
        return sum(wait_s <= patience_s for wait_s in self.waits_s) / len(self.waits_s)

    def begin_step(self) -> None:
        """Clear the counters of the last step."""
        self.bytes_per_step, self.durations_s, self.waits_s = [0], [], []

    def add_live(self, change: int) -> None:
        """Record that a stage activation was made (+1) or freed (-1)."""
        self.live_now += change
        self.live_peak = max(self.live_peak, self.live_now)
        self.trace.append((time.monotonic(), self.live_now))

    def add_op(self, *, duration_s: float, wait_s: float) -> None:
        """Record that an op has run."""
        self.durations_s.append(duration_s)
        self.waits_s.append(wait_s)
        self.bytes_per_step.append(0)
        self._burst = 0

    def add_sent(self, num_bytes: int) -> None:
        """Record bytes that were sent since the last op."""
        self.bytes_per_step[-1] += num_bytes
        self._burst += num_bytes
        self.largest_burst = max(self.largest_burst, self._burst)

    def clear_trace(self) -> None:
        """Clear the trace and the peaks."""
        self.trace.clear()
        self.live_peak, self.largest_burst = self.live_now, 0


def peak_together(traces: Sequence[Iterable[tuple[float, int]]], since: float = 0.0) -> int:
    """The largest number of stage activations alive at one moment on several devices of one machine.

    `traces` has the `Report.trace` of each device. Moments before `since`, a time.monotonic(), do not count.
    """
    events = sorted((moment, device, alive) for device, trace in enumerate(traces) for moment, alive in trace)
    alive_on, peak = dict.fromkeys(range(len(traces)), 0), 0
    for moment, device, alive in events:
        alive_on[device] = alive
        if moment >= since:
            peak = max(peak, sum(alive_on.values()))
    return peak
